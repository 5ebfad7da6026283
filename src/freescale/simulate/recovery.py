"""Predicts the share of a cluster's time that is useful if failures interrupt training: pure
functions of measured costs.

    | notice | process start | rendezvous | restore | first step | repeated steps | useful ... |
    ^ a failure                                                                   the next failure ^

Costs are a TOML file with the source of every number (recoveries/*.toml are shipped).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from freescale.simulate.network import check_number, find_file, read_toml

# The base of every comparison: TorchRec's pipeline with its defaults, row-wise tables and no
# deduplication of ids (the peer of `freescale bench ladder`).
BASE = "TorchRec SparseDist"
ALL, UNBALANCED = "staged + balancing + hostwire", "staged + hostwire"
GIVEN = "as given"  # a single configuration
_BASE_NAME = "TorchRec's SparseDist"

LIMIT = 10.0  # percent of a step; above, something other than compute limits it
BATCH = "twice the batch"  # the only change that is not one of the machine
RECOVERIES = Path(__file__).parent / "recoveries"
MEMORY, BUDDY, DISK = "memory", "buddy", "disk"
PARTS = ("notice", "process start", "rendezvous", "restore", "first step", "repeated steps")


@dataclass(frozen=True)
class RecoveryCosts:
    """What a failure costs, apart from repeated steps."""

    name: str
    notice_s: float  # from the death of a rank until all ranks have ended
    # time until a restarted rank is ready for the rendezvous: fork, remaining imports, device;
    # with torchrun, the start of Python and all imports
    start_s: float
    meet_s: float  # rendezvous and connections: a constant, ...
    meet_per_rank_s: float
    meet_per_pair_s: float  # ... of ranks
    restore_s: float  # a constant
    memory_gb_per_s: float  # speed at which a rank restores and verifies its state
    disk_gb_per_s: float
    first_step_s: float  # extra time
    snapshot_percent: float  # share of a step that snapshots and the marking of rows take
    snapshot_s: float  # from the saved step until it can be restored
    checkpoint_s: float
    about: str = ""

    def __post_init__(self) -> None:
        for name in (entry.name for entry in fields(self) if entry.name not in ("name", "about")):
            what, rate = f"recovery {self.name!r}: {name}", name.endswith("gb_per_s")
            check_number(what, getattr(self, name), above=rate)


@dataclass(frozen=True)
class Training:
    """The run that failures interrupt."""

    gpus: int  # a rank each
    step_s: float  # without snapshots
    state_gb: float  # state of a rank: rows, dense weights and optimizer state
    snapshot_every: int  # steps
    checkpoint_every: int
    far_gb_per_s: float  # bandwidth of a rank's link to other machines


def list_costs(costs: RecoveryCosts, training: Training, source: str) -> dict[str, float]:
    """Seconds of each of `PARTS` for one failure, after which ranks restore from `source`. Failures
    come at any time: on average half an interval is lost, and the save in progress."""
    if source == DISK:
        rate, every, saving = costs.disk_gb_per_s, training.checkpoint_every, costs.checkpoint_s
    else:
        rate, every, saving = costs.memory_gb_per_s, training.snapshot_every, costs.snapshot_s
    restore = costs.restore_s + training.state_gb / rate
    if source == BUDDY:  # read there, then sent
        restore += training.state_gb / training.far_gb_per_s
    ranks = training.gpus
    slower = 1 + costs.snapshot_percent / 100
    values = (
        costs.notice_s,
        costs.start_s,
        costs.meet_s + (costs.meet_per_rank_s + costs.meet_per_pair_s * ranks) * ranks,
        restore,
        costs.first_step_s,
        every / 2 * training.step_s * slower + saving,
    )
    return dict(zip(PARTS, values, strict=True))


def compute_useful_time(
    costs: RecoveryCosts, training: Training, failure_every: float, source: str
) -> dict[str, Any]:
    """The share of time that advances the model, compared with a run without failures and
    snapshots, at a failure every `failure_every` seconds."""
    parts = list_costs(costs, training, source)
    kept = max(0.0, 1 - sum(parts.values()) / failure_every)
    return {
        "gpus": training.gpus,
        "from": source,
        "seconds": parts,
        "useful": kept / (1 + costs.snapshot_percent / 100),
    }


def load_recovery(name: str) -> RecoveryCosts:
    """Loads shipped costs by name, or a TOML file. ValueError if there is no such file, or it does
    not hold the costs."""
    path = find_file(RECOVERIES, name, ".toml", "costs of a recovery")
    known = {entry.name for entry in fields(RecoveryCosts)} - {"name"}
    raw = read_toml(path, known, known - {"about"}, "costs of a recovery are")
    return RecoveryCosts(path.stem, **raw)


def write_verdict(
    rows: Mapping[str, Mapping[str, Any]], changes: Sequence[Mapping[str, Any]], gpu: str
) -> str:
    """States the speedup over TorchRec, the gain of balancing, and what limits the step. `rows`:
    figures of each technique; `changes`: gains of better machines, for the same GPUs."""
    name = ALL if ALL in rows else GIVEN
    best, base = rows[name], rows[BASE]
    count = best["gpus"]
    if count == 1:
        return (
            f"One {gpu} has nobody to wait for: a step takes {best['step_ms']:,.1f} ms, "
            f"{best['samples_per_second']:,.0f} samples a second."
        )
    subject = "FreeScale trains this" if name == ALL else "this configuration trains"
    faster = _divide(best, base)
    text = f"On {count:,} {gpu}s {subject} {faster:.2f} times as fast as {_BASE_NAME}"
    unbalanced = rows.get(UNBALANCED)
    if unbalanced is not None:
        without, straggling = _divide(unbalanced, base), unbalanced["straggler_percent"]
        if without < 0.99 * faster:
            text += f"; without balancing {without:.2f} times: stragglers cost {straggling:.0f} %"
        else:
            text += "; balancing adds nothing here: the ranks have equal work"
    return f"{text}. {_name_limit(best, [c for c in changes if c['arm'] == name])}"


def _divide(row: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    return float(row["samples_per_second"] / base["samples_per_second"])


def _name_limit(row: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> str:
    """Names the limit of a step, and what a better machine would change."""
    exposed, straggler = row["exposed_percent"], row["straggler_percent"]
    gains = {
        change["change"]: change["more_samples_per_second_percent"]
        for change in changes
        if change["change"] != BATCH
    }
    part, gain = max(gains.items(), key=lambda one: one[1], default=("", 0.0))
    if exposed >= max(LIMIT, straggler):
        kinds = row["exposed_ms"]
        kind = max(kinds, key=lambda one: float(kinds[one]))
        text = f"What limits it is communication, {exposed:.0f} % of the step, most of it {kind}"
        return f"{text}: {part} would give {gain:.1f} % more." if gain >= 1 else f"{text}."
    if straggler >= LIMIT:
        return f"What limits it is the slowest rank: the others wait {straggler:.0f} % of the step."
    text = f"What limits it is compute, {100 - exposed - straggler:.0f} % of the step"
    if gain >= 1:
        return f"{text}; {part} would give {gain:.1f} % more."
    return f"{text}: no faster network would give 1 % more." if gains else f"{text}."
