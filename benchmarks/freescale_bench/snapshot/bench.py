"""Snapshots beside training, and restores, on the shared workload.

Snapshots are first taken at the pace of `auto`, until their interval has settled. Then they are
timed at that interval and at a given one. What they add is the sum of two medians: what the steps
that feel a snapshot take more than others of its turn, over the steps between two; and what steps
take more while rows are marked, where a few steps with marking and a few without alternate. The
time inside the calls that mark is a column of its own: none where kernels mark the rows that they
update. Then the same state is restored from memory,
and from a checkpoint whose files are synced and dropped from the page cache; both verify what they
read.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

import freescale
from freescale.embedding.optimizers import Adam
from freescale.ledger.machine import get_gpu_name
from freescale.train.checkpoint import Checkpoints
from freescale.train.snapshot.pace import BUDGET, WINDOW, Pace
from freescale.train.snapshot.snapshots import Snapshots
from freescale.transport.api import Transport
from freescale_bench.common.arm import Model, feed
from freescale_bench.common.ranks import join
from freescale_bench.common.results import Destination, Row, at_least, at_most, write
from freescale_bench.common.workload import Workload

if TYPE_CHECKING:
    from freescale.train.run_state import RunState

_SETTLING = 80  # steps
_RUN = 8  # steps with marking of rows, and as many without
_RESTORES = 3
WIDTH, IDS = 64, 7_000  # of the table; ids that a rank reads in a step


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: str
    state: float  # GB of a rank
    every: int  # steps between snapshots, beside `auto`
    turns: int
    each: int  # steps of a turn, at least

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


class Turn(NamedTuple):
    """Steps, one after the other."""

    seconds: list[float]
    begun: list[int]  # those that began a snapshot
    marked: list[float]  # seconds of which rows were marked

    def divide(self) -> tuple[float, list[float]]:
        """The median of steps that feel no snapshot; what each snapshot's steps take more."""
        windows = [range(first, first + WINDOW) for first in self.begun]
        feeling = {step for window in windows for step in window}
        usual = statistics.median(
            value for step, value in enumerate(self.seconds) if step not in feeling
        )
        whole = [window for window in windows if window[-1] < len(self.seconds)]
        return usual, [sum(self.seconds[step] - usual for step in window) for window in whole]


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
        self.snapshots = Snapshots(transport, "auto")
        self.run = secrets.token_hex(8)  # of rank 0
        self.run = transport.gather_bytes(self.run.encode())[0].decode()
        self.snapshots.open(self.run, 0)
        self.changed = [group.rows.changed for group in self.model.tables.groups]
        self.marking = 0.0  # seconds so far
        for each in self.changed:
            each.mark = self._time_calls(each.mark)  # type: ignore[method-assign, assignment]
        self._steps = self.pipeline.run(feed(workload, transport.rank, transport.world))

    def _time_calls(self, call: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def timed(rows: Tensor) -> None:
            begin = time.perf_counter()
            call(rows)
            self.marking += time.perf_counter() - begin

        return timed

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

    def make_steps(self, count: int, snapshots: bool) -> Turn:
        """A collective."""
        self._synchronize()
        seconds, begun, marked = [], [], []
        for number in range(count):
            begin, before = time.perf_counter(), self.snapshots.taking
            marking = self.marking
            next(self._steps)
            if snapshots:
                self.snapshots.take_if_due(self.state())
                if self.snapshots.taking is not before:
                    begun.append(number)
            seconds.append(time.perf_counter() - begin)
            marked.append(self.marking - marking)
        self._synchronize()
        return Turn(seconds, begun, marked)

    def settle_interval(self) -> int:
        """Trains at the pace of `auto` until two snapshots have not changed it, of those that cost
        what most do: from the third on."""
        self.snapshots.pace.interval = _SETTLING  # from where on it grows: a run has more time
        taken, same = 0, 0
        while taken < 5 or same < 2:
            before = self.snapshots.interval
            self.make_steps(before, snapshots=True)
            taken, same = taken + 1, same + 1 if self.snapshots.interval == before else 0
            if self.transport.rank == 0:
                print(f"a snapshot every {self.snapshots.interval} steps", flush=True)
        self.finish()
        return self.snapshots.interval

    def take(self) -> float:
        """Takes a snapshot and waits for it; its seconds."""
        self.snapshots.due = 0
        next(self._steps)
        self.snapshots.take_if_due(self.state())
        return self.finish()

    def take_whole(self) -> float:
        self.snapshots.forget_files()
        return self.take()

    def finish(self) -> float:
        """Waits for the snapshot under way; its seconds."""
        taking = self.snapshots.taking
        assert taking is not None
        self.model.tables.finish_captures()  # as the rows are after the last step
        taking.done.wait()
        if taking.error is not None:
            raise taking.error
        return taking.seconds

    def begin_turns(self, interval: int) -> None:
        """From now on each snapshot finds the changes of two intervals, as it does in a run."""
        self.snapshots.pace = Pace(interval)
        self.take_whole()
        self.make_steps(interval, snapshots=False)
        self.take()
        self.make_steps(interval - interval // 2, snapshots=False)

    def time_with(self, interval: int, count: int) -> Turn:
        """Steps with snapshots, the first in the middle of an interval."""
        self.snapshots.due = self.pipeline.steps + max(1, interval // 2)
        turn = self.make_steps(count, snapshots=True)
        self.finish()
        return turn

    def time_marking(self, count: int) -> dict[bool, list[float]]:
        """Seconds of steps, by whether rows are marked. The files lack the changes of steps
        without."""
        changed = self.changed
        marks = [each.marks for each in changed]
        found: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * count // _RUN):
            marking = number % 2 == 0
            for each, of in zip(changed, marks, strict=True):
                each.marks = of if marking else None
            # the first step of a run updates some rows of the step before
            found[marking] += self.make_steps(_RUN, snapshots=False).seconds[1:]
        for each, of in zip(changed, marks, strict=True):
            each.marks = of
        return found

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


def bench_rank(plan: Plan, to: Destination, restores_alone: bool = False) -> None:
    """As one of the ranks."""
    transport = join(plan.device, 300.0)
    root = tempfile.mkdtemp(prefix="freescale-snapshot-") if transport.rank == 0 else ""
    root = transport.gather_bytes(root.encode())[0].decode()
    measured = Measured(plan, transport, Path(root) / "checkpoints")
    try:
        rows = _measure_restores(measured) if restores_alone else _measure(measured)
    finally:
        measured.snapshots.abandon(end=True)
    transport.gather_bytes(b"")
    if transport.rank == 0:
        import shutil

        shutil.rmtree(root)
        _write(plan, transport, rows, to)
    transport.close()


def _measure(measured: Measured) -> list[Row]:
    measured.make_steps(5, snapshots=False)
    found = measured.settle_interval()
    rows = [
        {"snapshot_every": asked, **_compare(measured, interval)}
        for asked, interval in (("auto", found), (measured.plan.every, measured.plan.every))
    ]
    return [*rows, _restore(measured)]


def _measure_restores(measured: Measured) -> list[Row]:
    """Several, one after the other: the first pins memory, and maps pages."""
    measured.make_steps(5, snapshots=False)
    return [_restore(measured) for _ in range(_RESTORES)]


def _compare(measured: Measured, interval: int) -> Row:
    """Steps with snapshots beside steps without."""
    plan = measured.plan
    count = interval * max(1, round(plan.each / interval))
    measured.begin_turns(interval)
    steps: dict[bool, list[float]] = {True: [], False: []}
    turns, by_turn = [], []
    for _ in range(plan.turns):
        turns.append(measured.time_with(interval, count))
        found = measured.time_marking(plan.each)
        on, off = (statistics.median(found[marked]) for marked in (True, False))
        by_turn.append(100 * (on / off - 1))
        for marked, seconds in found.items():
            steps[marked] += seconds
    step = statistics.median(steps[False])
    marking = statistics.median(steps[True]) / step - 1
    calls = statistics.median(of for turn in turns for of in turn.marked)
    snapshots = [seconds for turn in turns for seconds in turn.divide()[1]]
    snapshot = statistics.median(snapshots)
    total = statistics.mean(seconds for turn in turns for seconds in turn.seconds)
    taking = measured.snapshots.taking
    assert taking is not None
    return {
        "interval": interval,
        "step_ms": 1e3 * step,
        "snapshot_ms": 1e3 * snapshot,
        "snapshots_ms": [1e3 * seconds for seconds in snapshots],
        "marking_percent": 100 * marking,
        "marking_turns_percent": by_turn,
        "marking_calls_percent": 100 * calls / step,
        "more_percent": 100 * (marking + snapshot / (interval * step)),
        "means_more_percent": 100 * (total / statistics.mean(steps[False]) - 1),
        "changes_seconds": taking.seconds,
        "changes_processor_seconds": taking.processor,
    }


def _restore(measured: Measured) -> Row:
    whole = measured.take_whole()
    memory, exact = measured.restore(disk=False)
    measured.checkpoints.save(measured.model, measured.optimizer, {"step": measured.pipeline.steps})
    if measured.transport.rank == 0:
        _drop_from_cache(measured.checkpoints.folder)
    disk, equal = measured.restore(disk=True)
    return {
        "whole_seconds": whole,
        "memory_seconds": memory,
        "disk_seconds": disk,
        "restored_exactly": exact and equal,
    }


def _write(plan: Plan, transport: Transport, rows: list[Row], to: Destination) -> None:
    share = f"{plan.state:g} GB of state a rank, {transport.world} ranks"
    name, slowest, claims = "snapshot-restore", f", the slowest of {len(rows)}", []
    if "more_percent" in rows[0]:
        name, slowest = "snapshot", ""
        claims.append(
            at_most(
                f"step with snapshots (auto), beside without: {share}",
                100 * BUDGET,
                rows[0]["more_percent"],
                "% longer",
            )
        )
    claims += [
        at_most(
            f"restore from memory{slowest}, verification included: {share}",
            1.0,
            max(row["memory_seconds"] for row in rows if "memory_seconds" in row),
            "s",
        ),
        at_least(
            "both restores have the bits of the trained table and its row state (1: all)",
            1.0,
            float(all(row.get("restored_exactly", True) for row in rows)),
            "",
        ),
    ]
    about: dict[str, Any] = asdict(plan) | {"ranks": transport.world}
    about |= asdict(plan.make_workload(transport.world)) | {"row_optimizer": "adam"}
    testbed = f"{transport.world}ranks-{get_gpu_name()}" if plan.device == "cuda" else "cpu"
    what = "snapshot restore" if name == "snapshot-restore" else "snapshot"
    command = f"freescale bench {what} --device {plan.device} --nproc {transport.world}"
    write(name, testbed, command, rows, claims, to=to, workload=about)
