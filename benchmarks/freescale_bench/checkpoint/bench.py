"""What checkpoints and snapshots add to training, as `--checkpoint-every 50 --async-checkpoints`
and `--snapshot-every 50` make them, and how long restores take.

Turns of 50 steps that save after the first of them and turns that do not alternate in one run, so
that whatever else the machine does falls on both. A turn ends when what it saved is complete: what
the writing takes of the machine is in the turn, and how long it takes beyond the steps is a figure
of its own. So are the steps one by one, which shows where saving is felt. Rows are marked only in
turns with a snapshot, whose marks are part of what it adds. Restores are from memory, and from a
checkpoint whose files are synced and dropped from the page cache; both verify what they read, and
must give the bits of the trained table and its row state.
"""

from __future__ import annotations

import itertools
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from freescale.train.checkpoint import Checkpoints
from freescale.train.snapshot.pace import BUDGET
from freescale.train.snapshot.snapshots import Snapshots
from freescale.transport.api import Transport
from freescale_bench.common.machine import get_gpu_name
from freescale_bench.common.ranks import open_rank
from freescale_bench.common.results import Destination, Row, at_least, at_most, write
from freescale_bench.common.spread import spread
from freescale_bench.common.turns import wait_idle
from freescale_bench.train.shapes import SHAPES, Shape
from freescale_bench.train.trained import SMALL, Trained, prepare

if TYPE_CHECKING:
    from freescale.train.run_state import RunState

EVERY = 50  # steps of a turn
_WARMUP = 100  # steps, by which every size of batch has its CUDA graph
_ROW_NUMBERS = 3  # of each column of a row: its value and both of Adam's moments
_BATCHES = EVERY  # that come again: each turn has the same
_LIMIT = 600.0  # seconds of a collective
_RESTORES = 3
_NAMES = {"training": "checkpoint-training", "snapshots": "snapshot", "restore": "snapshot-restore"}


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    what: str  # training, snapshots, restore
    device: str
    state: float  # GB of a rank
    turns: int

    def make_shape(self, ranks: int) -> Shape:
        """The long shape of `freescale bench train` on GPUs, half of its batch on each: they may
        share one."""
        shape = replace(SHAPES["long"], samples=8) if self.device == "cuda" else SMALL
        items = int(self.state * 1e9 / (shape.width * 4 * _ROW_NUMBERS)) * ranks - 1
        return replace(shape, items=items, samples=shape.samples * ranks, batches=_BATCHES, users=0)


@dataclass(frozen=True)
class Turn:
    """`EVERY` steps."""

    seconds: float
    late: float  # seconds of them after the last step, until what was saved was complete
    steps_ms: list[float]  # each, for the host; the second has what saving takes of the main thread
    save_ms: float  # of it


class Measured:
    """A rank that trains as `freescale train` does, and saves."""

    def __init__(self, plan: Plan, transport: Transport, folder: Path) -> None:
        """A collective."""
        self.plan, self.transport = plan, transport
        shape = plan.make_shape(transport.world)
        settings = {"num_items": shape.items + 1}
        config, data = prepare(
            shape, folder, transport, data=settings, train={"placement": "sharded"}
        )
        batches = [data.batch(number) for number in range(_BATCHES)]
        if plan.device == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        trained = Trained.build(config, data, transport)
        self.model, self.optimizer = trained.model, trained.optimizer
        self.pipeline = trained.pipeline
        self._steps = self.pipeline.run(itertools.cycle(batches))
        self.make_steps(1)  # tables are there
        asynchronous = plan.what == "training"
        self.checkpoints = Checkpoints(folder / "checkpoints", transport, asynchronous=asynchronous)
        self.snapshots = Snapshots(transport, EVERY)
        if not asynchronous:
            self.run = transport.gather_bytes(secrets.token_hex(8).encode())[0].decode()
            self.snapshots.open(self.run, 0)

    def make_steps(self, count: int) -> list[float]:
        """Returns when each was over, for the host."""
        ends = []
        for _ in range(count):
            next(self._steps)
            ends.append(time.perf_counter())
        self.pipeline.ledger.drain()
        return ends

    def save(self) -> None:
        """Begins a checkpoint or a snapshot. A collective."""
        if self.plan.what != "training":
            self.snapshots.due = 0
            self.snapshots.take_if_due(self._describe_run())
            return
        self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        progress = {"step": self.pipeline.steps}
        self.checkpoints.save(self.model, self.optimizer, progress, self.pipeline.reducer)

    def finish(self) -> None:
        """Waits until what was saved is complete."""
        if self.plan.what == "training":
            self.checkpoints.wait()
            return
        taking = self.snapshots.taking
        assert taking is not None
        self.model.tables.lease.finish_captures()  # as the rows are after the last step
        taking.done.wait()
        if taking.error is not None:
            raise taking.error

    def _describe_run(self) -> RunState:
        """The parts of a run that snapshots look at."""
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

    def time_turn(self, save: bool) -> Turn:
        """A collective."""
        with nullcontext() if save else self._unmarked():
            return self._time_turn(save)

    @contextmanager
    def _unmarked(self) -> Iterator[None]:
        """No rows are marked. What was saved before lacks the changes of these steps."""
        changed = [group.rows.changed for group in self.model.tables.groups]
        marks = [each.marks for each in changed]
        for each in changed:
            each.marks = None
        yield
        for each, of in zip(changed, marks, strict=True):
            each.marks = of

    def _time_turn(self, save: bool) -> Turn:
        self._meet()
        begin = time.perf_counter()
        ends = self.make_steps(1)
        if save:
            self.save()
        saved = time.perf_counter()
        ends += self.make_steps(EVERY - 1)
        self._meet()
        trained = time.perf_counter()
        if save:
            self.finish()
            self._meet()
        end = time.perf_counter()
        each = [1e3 * (after - before) for before, after in itertools.pairwise([begin, *ends])]
        return Turn(end - begin, end - trained, each, 1e3 * (saved - ends[0]))

    def time_turns(self) -> Row:
        """Turns with and without, alternating. A collective."""
        self.make_steps(_WARMUP)
        for _ in range(2):  # makes what later ones use again
            self.time_turn(save=True)
        turns: dict[bool, list[Turn]] = {False: [], True: []}
        for number in range(self.plan.turns):
            for save in (False, True) if number % 2 else (True, False):
                turns[save].append(turn := self.time_turn(save))
                if self.transport.rank == 0:
                    late = f", {turn.late:.3f} of them to complete it" if save else ""
                    print(
                        f"{'with' if save else 'without'}: {turn.seconds:.3f} s{late}", flush=True
                    )
                    print("  steps", *(f"{ms:.0f}" for ms in turn.steps_ms), "ms", flush=True)
        return _describe(self.plan.what, turns)

    def restore(self) -> Row:
        """Seconds of a restore from memory and of one from disk. A collective."""
        self.snapshots.forget_files()
        self.make_steps(1)
        begin = time.perf_counter()
        self.save()
        self.finish()
        whole = time.perf_counter() - begin
        memory, exact = self._time_restore(self._load_snapshot)
        self._save_checkpoint()
        if self.transport.rank == 0:
            _drop_from_cache(self.checkpoints.folder)
        disk, equal = self._time_restore(self._load_checkpoint)
        return {
            "whole_seconds": whole,
            "memory_seconds": memory,
            "disk_seconds": disk,
            "restored_exactly": exact and equal,
        }

    def _load_checkpoint(self) -> None:
        self.checkpoints.load(self.checkpoints.find("last"), self.model, self.optimizer)

    def _load_snapshot(self) -> None:
        found = self.snapshots.find(self.run)
        choice = found.choose() if found is not None else None
        assert found is not None and choice is not None
        found.load(choice, self.model, self.optimizer, self.pipeline.reducer)

    def is_exact(self) -> bool:
        """Whether the rows of a checkpoint are those that were trained. A collective."""
        self._save_checkpoint()
        self.checkpoints.wait()
        return self._time_restore(self._load_checkpoint)[1]

    def _time_restore(self, load: Callable[[], None]) -> tuple[float, bool]:
        """Damages the rows in memory and restores them: the seconds, and whether they are what they
        were on all ranks. A collective."""
        self.pipeline.flush()
        rows = self.model.tables.get_local_state("item")
        expected = {name: value.clone() for name, value in rows.items()}
        for value in rows.values():
            value.zero_()
        self._meet()
        begin = time.perf_counter()
        load()
        self._meet()
        seconds = time.perf_counter() - begin
        found = self.model.tables.get_local_state("item")
        equal = all(torch.equal(value, expected[name]) for name, value in found.items())
        every = self.transport.gather_bytes(b"1" if equal else b"0")
        return seconds, all(part == b"1" for part in every)

    def _meet(self) -> None:
        wait_idle(self.transport.device)
        self.transport.gather_bytes(b"")


def _drop_from_cache(folder: Path) -> None:
    """What was written is on the disk, and the next reader gets it from there."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def bench_rank(plan: Plan, to: Destination) -> None:
    """As one of the ranks."""
    with open_rank(plan.device, _LIMIT) as (transport, folder):
        measured = Measured(plan, transport, folder)
        try:
            rows = [] if plan.what == "restore" else [measured.time_turns()]
            if plan.what == "training":
                rows[0]["restored_exactly"] = measured.is_exact()
            elif plan.what == "snapshots":
                assert measured.snapshots.taking is not None
                rows[0]["changes_seconds"] = measured.snapshots.taking.seconds
                rows.append(measured.restore())
            else:  # several, one after the other: the first pins memory, and maps pages
                rows = [measured.restore() for _ in range(_RESTORES)]
        finally:
            if plan.what != "training":
                measured.snapshots.abandon(end=True)
        if transport.rank == 0:
            _write(plan, transport, rows, to)
        measured.pipeline.close()


def _describe(what: str, turns: dict[bool, list[Turn]]) -> Row:
    without, saved = ([turn.seconds for turn in turns[save]] for save in (False, True))
    ratios = [more / less for more, less in zip(saved, without, strict=True)]
    return {
        "arm": f"with {'checkpoints' if what == 'training' else what} beside without",
        "step_ms": spread([1e3 * each / EVERY for each in without]),
        "step_ms_with_checkpoints": spread([1e3 * each / EVERY for each in saved]),
        "more_percent": 100 * (sum(saved) / sum(without) - 1),
        "median_more_percent": 100 * (statistics.median(ratios) - 1),
        "turns_more_percent": [100 * (ratio - 1) for ratio in ratios],
        "waited_for_disk_s": [turn.late for turn in turns[True]],
        "save_ms": [turn.save_ms for turn in turns[True]],
        "steps_ms": _average_steps(turns[False]),
        "steps_ms_with_checkpoints": _average_steps(turns[True]),
    }


def _average_steps(turns: list[Turn]) -> list[float]:
    """[EVERY]: the median over the turns of each step."""
    return [
        round(statistics.median(step), 3)
        for step in zip(*(turn.steps_ms for turn in turns), strict=True)
    ]


def _write(plan: Plan, transport: Transport, rows: list[Row], to: Destination) -> None:
    share, claims = f"{plan.state:g} GB of state a rank, {transport.world} ranks", []
    if plan.what != "restore":
        word, most = ("checkpoint", 0.5) if plan.what == "training" else ("snapshot", 100 * BUDGET)
        text = (
            f"wall time of {EVERY * plan.turns} steps with a {word} every {EVERY}, beside without"
        )
        claims.append(at_most(f"{text}: {share}", most, rows[0]["more_percent"], "% longer"))
    if seconds := [row["memory_seconds"] for row in rows if "memory_seconds" in row]:
        slowest = f", the slowest of {len(seconds)}" if len(seconds) > 1 else ""
        text = f"restore from memory{slowest}, verification included: {share}"
        claims.append(at_most(text, 1.0, max(seconds), "s"))
    exact = all(row.get("restored_exactly", True) for row in rows)
    restores = "the last checkpoint has" if plan.what == "training" else "both restores have"
    text = f"{restores} the bits of the trained table and its row state (1: all)"
    claims.append(at_least(text, 1.0, float(exact), ""))
    about: dict[str, Any] = asdict(plan) | {"ranks": transport.world, "row_optimizer": "adam"}
    about["shape"] = plan.make_shape(transport.world).describe()
    testbed = f"{transport.world}ranks-{get_gpu_name()}" if plan.device == "cuda" else "cpu"
    command = f"freescale bench checkpoint {plan.what} --device {plan.device}"
    command += f" --nproc {transport.world} --state {plan.state:g} --turns {plan.turns}"
    write(_NAMES[plan.what], testbed, command, rows, claims, to=to, workload=about)
