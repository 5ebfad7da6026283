"""The runs of the storms: small ones, which train and save in different ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from faults.plan import CHECKPOINT_EVERY

_USERS = 96
HOSTS = 2  # of storms over hosts
FORKED, LAUNCHED, TORCHRUN = "forked", "freescale train", "torchrun"


@dataclass(frozen=True)
class Setting:
    """How the run of a storm trains and saves.

    Attributes:
        world: ranks; the most where their number changes.
        fewest: ranks, where each attempt has another number of them; else `world`.
        hosts: that they are divided over; 1: one machine.
        asynchronous: checkpoints are written beside training.
        full_every: write a full checkpoint every so many.
        snapshot_every: steps between snapshots in memory; 0: none.
        transport, timeout: of `freescale train`.
        start: how ranks start: forked, or by `freescale train` or torchrun as anyone's do.
        device: of the ranks, which may share one GPU.
    """

    world: int
    fewest: int
    hosts: int
    asynchronous: bool
    full_every: int
    snapshot_every: int
    transport: str
    timeout: float
    start: str = FORKED
    device: str = "cpu"

    @property
    def changes(self) -> bool:
        """Whether attempts differ in their number of ranks. Such runs train in float64: what
        another number of ranks changes is rounding, and has to stay within it."""
        return self.fewest < self.world

    def describe(self) -> str:
        where = f"{self.hosts} hosts" if self.hosts > 1 else "one machine"
        how = "beside training" if self.asynchronous else "between steps"
        deltas = f", one of {self.full_every} full" if self.full_every > 1 else ""
        every = f", a snapshot every {self.snapshot_every} steps" if self.snapshot_every else ""
        ranks = f"{self.fewest} to {self.world}" if self.changes else f"{self.world}"
        started = "" if self.start == FORKED else f", started by {self.start}"
        kind = "GPU ranks" if self.device == "cuda" else "ranks"
        return (
            f"{ranks} {kind} of {where}, transport {self.transport}, checkpoints written {how}"
            f"{deltas}{every}{started}"
        )


def read_ranks(text: str) -> list[tuple[int, int]]:
    """(fewest, most) ranks of the storms in turn, from "2,4,2:4".

    Raises:
        ValueError: that is no list of numbers or ranges.
    """
    found = []
    for word in text.split(","):
        ends = word.split(":")
        if len(ends) > 2 or not all(end.isdecimal() and int(end) for end in ends):
            raise ValueError(
                f"--ranks {text}: {word!r} is neither a number of ranks nor FEWEST:MOST"
            )
        fewest, most = int(ends[0]), int(ends[-1])
        if fewest > most:
            raise ValueError(f"--ranks {text}: {word} has more ranks at least than at most")
        found.append((fewest, most))
    return found


def choose_setting(
    seed: int,
    ranks: str,
    hosts: int,
    timeout: float,
    start: str = FORKED,
    device: str = "cpu",
) -> Setting:
    """Storms of consecutive seeds differ in all of it.

    Args:
        ranks: of the storms in turn, as of `read_ranks`. Over hosts their number does not change.
    """
    worlds = [ends for ends in read_ranks(ranks) if hosts == 1 or ends[0] == ends[1]] or [(2, 2)]
    fewest, most = worlds[seed % len(worlds)]
    transports = ("hostwire-tcp", "collective") if hosts > 1 else ("auto", "collective")
    return Setting(
        most,
        fewest,
        hosts,
        seed // 2 % 2 == 0,
        (3, 1)[seed // 4 % 2],
        (2, 0)[seed // 2 % 2],
        transports[(seed + seed // 2) % 2],
        timeout,
        start,
        device,
    )


def make_data(path: Path) -> None:
    """Interactions, which a run has to prepare."""
    draw = np.random.default_rng(0)
    events = _USERS * 14
    columns = {
        "user_id": draw.integers(0, _USERS, events),
        "item_id": draw.zipf(1.3, events) % 200,
        "timestamp": np.arange(events) * 10,
    }
    pq.write_table(pa.table(columns), path)


def make_command(data: Path, cache: Path, run: Path, steps: int, setting: Setting) -> list[str]:
    """`freescale ...` of a run, without its ranks and --resume."""
    words = [
        *("train", "--device", setting.device, "--data", data, "--cache", cache, "--folder", run),
        *("--split", "none", "--max-length", 20, "--global-batch", 16, "--epochs", 1_000_000),
        *("--width", 8, "--layers", 1, "--negatives", 8, "--placement", "sharded"),
        *("--dense-sums", "collective", "--transport", setting.transport, "--steps", steps),
        *(
            "--log-every",
            1,
            "--trace-steps",
            0,
            "--timeout",
            setting.timeout,
            "--keep-checkpoints",
            3,
        ),
        *("--checkpoint-every", CHECKPOINT_EVERY, "--full-every", setting.full_every),
        *(["--async-checkpoints"] if setting.asynchronous else []),
        *(["--snapshot-every", setting.snapshot_every] if setting.snapshot_every else []),
    ]
    return [str(word) for word in words]
