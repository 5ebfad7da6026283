"""Storms of faults, one after another, and what they leave."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.bench.faults.plan import CHECKPOINT_EVERY, KINDS, Fault, count_steps, plan_faults
from freescale.bench.faults.proof import compare_logs, compare_states, read_final_state, read_log
from freescale.bench.faults.storm import Storm
from freescale.bench.faults.strikes import Strikes
from freescale.bench.faults.testbed import LocalTestbed, adopt_orphans, has_disks, mount_disk

TIMEOUT = 3.0  # of the runs' collectives


@dataclass(frozen=True)
class Setting:
    """How the run of a storm trains and saves; storms of different seeds differ in it."""

    world: int
    asynchronous: bool
    full_every: int
    transport: str

    def as_words(self) -> list[str]:
        words = ["--full-every", str(self.full_every), "--transport", self.transport]
        return [*words, *(["--async-checkpoints"] if self.asynchronous else [])]


def choose_setting(seed: int, worlds: Sequence[int]) -> Setting:
    return Setting(
        worlds[seed % len(worlds)],
        seed % 2 == 0,
        (3, 1)[seed // 2 % 2],
        ("auto", "hostwire-tcp", "collective")[seed % 3],
    )


def list_kinds(*, disk: bool, hosts: bool) -> list[str]:
    """The kinds of faults that a testbed has."""
    there = {"", *(["disk"] if disk else []), *(["hosts"] if hosts else [])}
    return [name for name, kind in KINDS.items() if kind.needs in there]


def make_data(path: Path) -> None:
    """Interactions of 96 users, which a run has to prepare."""
    draw = np.random.default_rng(0)
    events = 96 * 14
    table = pa.table(
        {
            "user_id": draw.integers(0, 96, events),
            "item_id": draw.zipf(1.3, events) % 200,
            "timestamp": np.arange(events) * 10,
        }
    )
    pq.write_table(table, path)


def make_command(work: Path, steps: int, setting: Setting) -> list[str]:
    return [
        *("train", "--device", "cpu", "--data", str(work / "events.parquet")),
        *("--cache", str(work / "cache"), "--split", "none", "--max-length", "20"),
        *("--global-batch", "16", "--width", "8", "--layers", "1", "--negatives", "8"),
        *("--placement", "sharded", "--dense-sums", "collective", "--log-every", "1"),
        *("--epochs", "100000", "--steps", str(steps), "--timeout", str(TIMEOUT)),
        *("--checkpoint-every", str(CHECKPOINT_EVERY), "--keep-checkpoints", "3"),
        *("--trace-steps", "0", *setting.as_words()),
    ]


def run_storm(work: Path, seed: int, number: int, setting: Setting, kinds: Sequence[str]) -> dict[str, Any]:
    """A storm and the undisturbed run beside it; the row of the result."""
    work.mkdir(parents=True, exist_ok=True)
    faults = plan_faults(seed, number, setting.world, kinds)
    if not (work / "events.parquet").exists():
        make_data(work / "events.parquet")
    command = make_command(work, count_steps(faults), setting)
    calm = _run(work / "calm", command, [], work / "cache", setting)
    print(f"seed {seed}: {setting}, {count_steps(faults)} steps, {calm.wall:.0f} s undisturbed")
    storm = _run(work / "storm", command, faults, work / "cache", setting)
    return describe(work, seed, setting, faults, storm, calm)


def _run(folder: Path, command: Sequence[str], faults: Sequence[Fault], cache: Path, setting: Setting) -> Storm:
    """A run in `folder`, unless it is complete there already."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="fs-faults-"))  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "storm"))
        listener.listen(64)
        run = folder / "disk" / "run"
        storm = Storm(
            LocalTestbed(folder, setting.world, place / "storm"),
            [*command, "--folder", str(run)],
            faults,
            Strikes(run, cache, TIMEOUT),
            folder / "state.json",
            listener,
        )
        try:
            if not (folder / "complete").exists():
                storm.run()
                (folder / "complete").touch()
        finally:
            shutil.rmtree(place)
    return storm


def describe(work: Path, seed: int, setting: Setting, faults: Sequence[Fault], storm: Storm, calm: Storm) -> dict[str, Any]:
    """The row of a storm."""
    logs = [read_log(work / name / "samples") for name in ("storm", "calm")]
    states = [
        read_final_state(work / name / "disk" / "run", work / name / "output.txt")
        for name in ("storm", "calm")
    ]
    steps = count_steps(faults)
    return {
        "seed": seed,
        "faults": len(storm.events),
        "without_a_fault": storm.unplanned,
        "seconds": storm.wall,
        "undisturbed_seconds": calm.wall,
        "seconds_per_fault": (storm.wall - calm.wall) / max(1, len(storm.events)),
        **compare_logs(*logs),
        **compare_states(states[0], states[1], steps),
        "events": storm.events,
    }
