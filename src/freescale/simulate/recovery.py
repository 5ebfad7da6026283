"""Predicts the share of a cluster's time that is useful if failures interrupt training: pure
functions of measured costs.

    | notice | process start | rendezvous | restore | first step | repeated steps | useful ... |
    ^ a failure                                                                   the next failure ^

Costs are a TOML file with the source of every number (recoveries/*.toml are shipped).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from freescale.simulate.shipped import check_number, find_file, read_toml

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
