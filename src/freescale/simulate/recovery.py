"""Predicts the share of a cluster's time that is useful if failures interrupt training: pure
functions of measured costs.

    | notice | process start | rendezvous | restore | first step | repeated steps | useful ... |
    ^ a failure                                                                   the next failure ^

Costs are a TOML file with the source of every number (recoveries/*.toml are shipped).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from freescale.simulate.shipped import list_names, read_toml

RECOVERIES = Path(__file__).parent / "recoveries"
MEMORY, BUDDY, DISK = "memory", "buddy", "disk"
PARTS = ("notice", "process start", "rendezvous", "restore", "first step", "repeated steps")


@dataclass(frozen=True)
class RecoveryCosts:
    """What a failure costs, apart from repeated steps."""

    name: str
    notice_s: float  # from the death of a rank until all ranks have ended
    # until a restarted rank is ready for the rendezvous: the fork, remaining imports, the device;
    # with torchrun, Python and all imports
    start_s: float
    meet_s: float  # rendezvous and connections: a constant, ...
    meet_per_rank_s: float
    meet_per_pair_s: float  # ... of ranks
    restore_s: float  # a constant
    memory_gb_per_s: float  # at which a rank restores and verifies its state
    disk_gb_per_s: float
    first_step_s: float  # extra time
    snapshot_percent: float  # of a step, for snapshots and the marking of rows
    snapshot_s: float  # from the saved step until it can be restored
    checkpoint_s: float
    about: str = ""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in ("name", "about"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"recovery {self.name!r}: {entry.name} is {value!r}, no number")
            rate = entry.name.endswith("gb_per_s")
            if not math.isfinite(value) or value < 0 or (rate and value == 0):
                least = "above 0" if rate else "0 or more"
                raise ValueError(
                    f"recovery {self.name!r}: {entry.name} is {value}; it must be {least}"
                )


@dataclass(frozen=True)
class Training:
    """The run that failures interrupt."""

    gpus: int  # a rank each
    step_s: float  # without snapshots
    state_gb: float  # of a rank: rows, dense weights and optimizer state
    snapshot_every: int  # steps
    checkpoint_every: int
    far_gb_per_s: float  # of a rank's link to other machines


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


def list_recoveries() -> list[str]:
    return list_names(RECOVERIES)


def load_recovery(name: str) -> RecoveryCosts:
    """Loads shipped costs by name, or a TOML file. ValueError if there is no such file, or it does
    not hold the costs."""
    path = RECOVERIES / f"{name}.toml" if name in list_recoveries() else Path(name)
    if not path.is_file():
        raise ValueError(
            f"--recovery {name}: there is {', '.join(list_recoveries())}, or a TOML file like "
            "those of freescale/simulate/recoveries"
        )
    known = {entry.name for entry in fields(RecoveryCosts)} - {"name"}
    raw = read_toml(path, known, known - {"about"}, "costs of a recovery are")
    return RecoveryCosts(path.stem, **raw)
