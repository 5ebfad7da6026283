"""The runs of the storms: small ones, which train and save in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.bench.faults.plan import CHECKPOINT_EVERY

_USERS = 96


@dataclass(frozen=True)
class Setting:
    """How the run of a storm trains and saves.

    Attributes:
        world: ranks.
        hosts: that they are divided over; 1: one machine.
        asynchronous: checkpoints are written beside training.
        full_every: every how many-th checkpoint is a full one.
        snapshot_every: steps between snapshots in memory; 0: none.
        transport, timeout: of `freescale train`.
    """

    world: int
    hosts: int
    asynchronous: bool
    full_every: int
    snapshot_every: int
    transport: str
    timeout: float

    def describe(self) -> str:
        where = f"{self.hosts} hosts" if self.hosts > 1 else "one machine"
        how = "beside training" if self.asynchronous else "between steps"
        deltas = f", one of {self.full_every} full" if self.full_every > 1 else ""
        every = f", a snapshot every {self.snapshot_every} steps" if self.snapshot_every else ""
        return (
            f"{self.world} ranks of {where}, transport {self.transport}, checkpoints written {how}"
            f"{deltas}{every}"
        )


def choose_setting(seed: int, worlds: Sequence[int], hosts: int, timeout: float) -> Setting:
    """Storms of consecutive seeds differ in all of it."""
    transports = ("hostwire-tcp", "collective") if hosts > 1 else ("auto", "collective")
    return Setting(
        worlds[seed % len(worlds)],
        hosts,
        seed // 2 % 2 == 0,
        (3, 1)[seed // 4 % 2],
        (2, 0)[seed // 2 % 2],
        transports[(seed + seed // 2) % 2],
        timeout,
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
        *("train", "--device", "cpu", "--data", data, "--cache", cache, "--folder", run),
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
