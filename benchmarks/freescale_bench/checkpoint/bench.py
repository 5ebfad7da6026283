"""Measures what `--checkpoint-every 50 --async-checkpoints` and `--snapshot-every 50` add to
training, and how long restores take.

Turns of 50 steps that save after their first step alternate with turns that do not, so noise from
the machine falls on both. A turn ends when its checkpoint or snapshot is complete, so the time
includes what the writing takes from training. The time after the last step is also reported by
itself, and so is every step, which shows where saving is felt. Rows are marked only in turns with a
snapshot: marking is part of its cost. Restores come from memory, and from a checkpoint whose files
are synced and dropped from the page cache. Both verify what they read, and must reproduce the
trained table and its row state to the bit.
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
from typing import Any

import torch

from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.contents import Contents
from freescale.train.state.pace import BUDGET
from freescale.train.state.snapshots import Snapshots
from freescale.transport.api import Transport
from freescale_bench.common.ranks import get_gpu_name, open_rank
from freescale_bench.common.results import Destination, Row, at_least, at_most, spread, write
from freescale_bench.common.turns import wait_idle
from freescale_bench.train.shapes import SHAPES, Shape
from freescale_bench.train.trained import SMALL, Trained, prepare

EVERY = 50  # steps of a turn
_WARMUP = 100  # steps, after which every batch size has a CUDA graph
_ROW_NUMBERS = 3  # per column of a row: its value and both of Adam's moments
_BATCHES = EVERY  # repeated: every turn has the same
_LIMIT = 600.0  # seconds: limit of a collective
_RESTORES = 3
_NAMES = {"training": "checkpoint-training", "snapshots": "snapshot", "restore": "snapshot-restore"}


@dataclass(frozen=True)
class Plan:
    """The options of a run."""

    what: str  # training, snapshots or restore
    device: str
    state: float  # GB per rank
    turns: int

    def make_shape(self, ranks: int) -> Shape:
        """The long shape of `freescale bench train` on GPUs, with half its batch per rank: ranks
        may share a GPU."""
        shape = replace(SHAPES["long"], samples=8) if self.device == "cuda" else SMALL
        items = int(self.state * 1e9 / (shape.width * 4 * _ROW_NUMBERS)) * ranks - 1
        return replace(shape, items=items, samples=shape.samples * ranks, batches=_BATCHES, users=0)


@dataclass(frozen=True)
class Turn:
    """`EVERY` steps."""

    seconds: float
    late: float  # of these seconds: from the last step until the save was complete
    steps_ms: list[float]  # host time; the second includes the main thread's part
    save_ms: float  # that part


class Measured:
    """A rank that trains like `freescale train`, and saves."""

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
        self.make_steps(1)  # creates the tables
        asynchronous = plan.what == "training"
        self.checkpoints = Checkpoints(folder / "checkpoints", transport, asynchronous=asynchronous)
        self.snapshots = Snapshots(transport, EVERY)
        if not asynchronous:
            self.run = transport.gather_bytes(secrets.token_hex(8).encode())[0].decode()
            self.snapshots.open(self.run, 0)

    def make_steps(self, count: int) -> list[float]:
        """Returns the host time at the end of each step."""
        ends = []
        for _ in range(count):
            next(self._steps)
            ends.append(time.perf_counter())
        self.pipeline.ledger.drain()
        return ends

    def save(self) -> None:
        """Starts a checkpoint or a snapshot. A collective."""
        if self.plan.what != "training":
            self.snapshots.due = 0
            self.snapshots.take_if_due(self.pipeline.steps, self.model.tables, self._collect)
            return
        self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        progress = {"step": self.pipeline.steps}
        self.checkpoints.save(self.model, self.optimizer, progress)

    def finish(self) -> None:
        """Waits until the checkpoint or snapshot is complete."""
        if self.plan.what == "training":
            self.checkpoints.wait()
            return
        taking = self.snapshots.taking
        assert taking is not None
        self.model.tables.lease.finish_captures()  # the rows as of the last step
        taking.done.wait()
        if taking.error is not None:
            raise taking.error

    def _collect(self, contents: Contents) -> None:
        progress = {"step": self.pipeline.steps, "pipeline": self.pipeline.state_dict()}
        contents.collect(self.model, self.optimizer, progress)
        contents.state["checkpoint"] = self.checkpoints.describe_parent()

    def time_turn(self, save: bool) -> Turn:
        """A collective."""
        with nullcontext() if save else self._unmarked():
            return self._time_turn(save)

    @contextmanager
    def _unmarked(self) -> Iterator[None]:
        """Turns row marking off: earlier saves miss the changes of these steps."""
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
        """Alternates turns with and without saving. A collective."""
        self.make_steps(_WARMUP)
        for _ in range(2):  # allocates what later turns reuse
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
        """Times a restore from memory and one from disk. A collective."""
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
        found.load(choice, self.model, self.optimizer)

    def is_exact(self) -> bool:
        """Whether a checkpoint has exactly the trained rows. A collective."""
        self._save_checkpoint()
        self.checkpoints.wait()
        return self._time_restore(self._load_checkpoint)[1]

    def _time_restore(self, load: Callable[[], None]) -> tuple[float, bool]:
        """Zeroes the rows in memory and restores them. Returns the seconds, and whether the rows
        are unchanged on all ranks. A collective."""
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
    """Syncs the files to disk and drops them from the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def bench_rank(plan: Plan, to: Destination) -> None:
    """Runs as one of the ranks."""
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
            else:  # several in a row: the first also pins memory and maps pages
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
        "arm": f"with {'checkpoints' if what == 'training' else what} against without",
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
    """[EVERY]: the median of each step over the turns."""
    return [
        round(statistics.median(step), 3)
        for step in zip(*(turn.steps_ms for turn in turns), strict=True)
    ]


def _write(plan: Plan, transport: Transport, rows: list[Row], to: Destination) -> None:
    share, claims = f"{plan.state:g} GB of state a rank, {transport.world} ranks", []
    if plan.what != "restore":
        word, most = ("checkpoint", 0.5) if plan.what == "training" else ("snapshot", 100 * BUDGET)
        text = (
            f"wall time of {EVERY * plan.turns} steps with a {word} every {EVERY}, against without"
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
