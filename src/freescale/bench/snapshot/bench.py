"""Snapshots beside training, and restores, on the shared workload.

Turns of steps with snapshots and without alternate in one run, so that whatever else the machine
does falls on both. A turn with snapshots begins with a whole one, which is complete before the
clock starts; what is timed are the changes that follow, and the marking of rows. Then the same
state is restored from memory, and from a checkpoint whose files are synced and dropped from the
page cache; both verify what they read.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

import freescale
from freescale.bench.common.arm import Model, feed
from freescale.bench.common.ranks import join
from freescale.bench.common.results import Destination, Row, claim, write
from freescale.bench.common.workload import Workload
from freescale.embedding.optimizers import Adam
from freescale.ledger.machine import get_gpu_name
from freescale.train.checkpoint import Checkpoints
from freescale.train.snapshot.contents import CONSUMER
from freescale.train.snapshot.snapshots import Snapshots
from freescale.transport.api import Transport

if TYPE_CHECKING:
    from freescale.train.run_state import RunState

WIDTH, IDS = 64, 7_000  # of the table; ids that a rank reads in a step


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: str
    state: float  # GB of a rank
    every: int
    turns: int
    each: int

    def as_arguments(self) -> list[str]:
        """For a rank that is started with a command line of its own."""
        return [word for name, value in asdict(self).items() for word in (f"--{name}", str(value))]

    def make_workload(self, ranks: int) -> Workload:
        per_row = 3 * 4 * WIDTH  # a row and both of Adam's moments
        return Workload(
            rows=int(self.state * 1e9 / per_row) * ranks,
            width=WIDTH,
            samples=IDS // 100,
            median_length=100.0,
            sigma=0.0,
            maximum_length=100,
            popularity=1.0,
            hidden=(256,),
            steps=20,
        )


class Measured:
    """A rank that trains, with the parts of a run that snapshots need."""

    def __init__(self, plan: Plan, transport: Transport, folder: Path) -> None:
        workload = plan.make_workload(transport.world)
        torch.manual_seed(0)
        self.transport, self.plan = transport, plan
        self.model = freescale.parallelize(
            Model(workload), {"item": ["history"]}, Adam(), transport=transport, placement="sharded"
        )
        self.model.tables.place()
        self.optimizer = torch.optim.SGD(self.model.dense_parameters(), lr=0.01)
        self.pipeline = freescale.Pipeline(
            self.model, self.optimizer, precision="fp32", check=False, balance="none"
        )
        self.checkpoints = Checkpoints(folder, transport)
        self.snapshots = Snapshots(transport, plan.every)
        self.run = secrets.token_hex(8)  # of rank 0
        self.run = transport.gather_bytes(self.run.encode())[0].decode()
        self.snapshots.open(self.run, 0)
        self._steps = self.pipeline.run(feed(workload, transport.rank, transport.world))

    def state(self) -> RunState:
        """Of a run, as far as snapshots look at it."""
        position = SimpleNamespace(step=self.pipeline.steps, pipeline=self.pipeline)
        progress = {"step": self.pipeline.steps, "pipeline": self.pipeline.state_dict()}
        found = SimpleNamespace(
            model=self.model,
            optimizer=self.optimizer,
            position=position,
            checkpoints=self.checkpoints,
            describe=lambda: progress,
        )
        return cast("RunState", found)

    def make_steps(self, count: int, snapshots: bool) -> float:
        """Seconds of a step. A collective."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            next(self._steps)
            if snapshots:
                self.snapshots.take_if_due(self.state())
        self._synchronize()
        return (time.perf_counter() - begin) / count

    def take_whole(self) -> float:
        """Takes a whole snapshot and waits for it; its seconds."""
        held = self.snapshots._held
        assert held is not None
        held.forget()
        self.snapshots._due = 0
        next(self._steps)
        self.snapshots.take_if_due(self.state())
        return self.finish()

    def finish(self) -> float:
        """Waits for the snapshot under way; its seconds."""
        taking = self.snapshots._taking
        assert taking is not None
        self.model.tables.finish_captures()  # as the rows are after the last step
        taking.done.wait()
        if taking.error is not None:
            raise taking.error
        return taking.seconds

    def stop_marking(self) -> None:
        for group in self.model.tables.groups:
            group.rows.changed.forget(CONSUMER)

    def _synchronize(self) -> None:
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize()
        self.transport.gather_bytes(b"")

    # ---- restores

    def copy_rows(self) -> dict[str, torch.Tensor]:
        self.pipeline.flush()
        local = self.model.tables.get_local_state("item")
        return {name: value.clone() for name, value in local.items()}

    def restore(self, disk: bool) -> tuple[float, bool]:
        """(seconds, whether the rows are what they were). A collective."""
        expected = self.copy_rows()
        for value in self.model.tables.get_local_state("item").values():
            value.zero_()
        self._synchronize()
        begin = time.perf_counter()
        if disk:
            self.checkpoints.load(self.checkpoints.find("last"), self.model, self.optimizer)
        else:
            found = self.snapshots.find(self.run)
            choice = found.choose() if found is not None else None
            assert found is not None and choice is not None
            found.load(choice, self.model, self.optimizer, self.pipeline.reducer)
        self._synchronize()
        seconds = time.perf_counter() - begin
        local = self.model.tables.get_local_state("item")
        return seconds, all(torch.equal(value, expected[name]) for name, value in local.items())


def _drop_from_cache(folder: Path) -> None:
    """What was written is on the disk, and the next reader gets it from there."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def bench_rank(plan: Plan, to: Destination) -> None:
    """As one of the ranks."""
    transport = join(plan.device, 300.0)
    root = tempfile.mkdtemp(prefix="freescale-snapshot-") if transport.rank == 0 else ""
    root = transport.gather_bytes(root.encode())[0].decode()
    measured = Measured(plan, transport, Path(root) / "checkpoints")
    try:
        row = _measure(measured)
    finally:
        measured.snapshots.abandon(end=True)
    transport.gather_bytes(b"")
    if transport.rank == 0:
        import shutil

        shutil.rmtree(root)
        _write(plan, transport, row, to)
    transport.close()


def _measure(measured: Measured) -> Row:
    plan = measured.plan
    measured.make_steps(5, snapshots=False)
    times: dict[bool, list[float]] = {True: [], False: []}
    whole, changes = [], []
    for _ in range(plan.turns):
        whole.append(measured.take_whole())
        times[True].append(measured.make_steps(plan.each, snapshots=True))
        changes.append(measured.finish())
        measured.stop_marking()
        times[False].append(measured.make_steps(plan.each, snapshots=False))
    measured.take_whole()
    memory, exact = measured.restore(disk=False)
    measured.checkpoints.save(measured.model, measured.optimizer, {"step": measured.pipeline.steps})
    if measured.transport.rank == 0:
        _drop_from_cache(measured.checkpoints.folder)
    disk, equal = measured.restore(disk=True)
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    return {
        "step_ms": 1e3 * statistics.median(times[False]),
        "step_ms_with_snapshots": 1e3 * statistics.median(times[True]),
        "more_percent": 100 * (statistics.median(ratios) - 1),
        "turns_more_percent": [100 * (ratio - 1) for ratio in ratios],
        "interval": measured.snapshots.interval,
        "whole_seconds": statistics.median(whole),
        "changes_seconds": statistics.median(changes),
        "memory_seconds": memory,
        "disk_seconds": disk,
        "restored_exactly": exact and equal,
    }


def _write(plan: Plan, transport: Transport, row: Row, to: Destination) -> None:
    share = f"{plan.state:g} GB of state a rank, {transport.world} ranks"
    claims = [
        claim(
            f"step with a snapshot every {plan.every} steps, beside without: {share}",
            1.0,
            row["more_percent"],
            "% longer",
            at_least=False,
        ),
        claim(
            f"restore from memory, verification included: {share}",
            1.0,
            row["memory_seconds"],
            "s",
            at_least=False,
        ),
        claim(
            "both restores have the bits of the trained table and its row state (1: all)",
            1.0,
            float(row["restored_exactly"]),
            "",
            at_least=True,
        ),
    ]
    about: dict[str, Any] = asdict(plan) | {"ranks": transport.world}
    about |= asdict(plan.make_workload(transport.world)) | {"row_optimizer": "adam"}
    testbed = f"{transport.world}ranks-{get_gpu_name()}" if plan.device == "cuda" else "cpu"
    command = f"freescale bench snapshot --device {plan.device} --nproc {transport.world}"
    write("snapshot", testbed, command, [row], claims, to=to, workload=about)
