"""What checkpoints add to training, as `--checkpoint-every 50 --async-checkpoints` makes them.

Turns of 50 steps with a checkpoint after the first of them and turns without one alternate in one
run, so that whatever else the machine does falls on both. A turn ends when its checkpoint is on the
disk: what the writing takes of the machine is in the turn, and how long the disk takes beyond the
steps is a figure of its own; so are the steps one by one, which shows where a checkpoint is felt:
in its copy, in its way to the host or in its way to the disk. At the end the last checkpoint is
loaded, which must have the bits of the trained table and its row state.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from freescale.config import RunConfig
from freescale.ledger.machine import get_gpu_name
from freescale.train.build import (
    build_model,
    build_optimizer,
    build_pipeline,
    load_histories,
    prepare_data,
)
from freescale.train.checkpoint import Checkpoints
from freescale.transport.api import Transport
from freescale_bench.common.ranks import join
from freescale_bench.common.results import Destination, Row, claim, write
from freescale_bench.common.spread import spread
from freescale_bench.train.files import write_interactions
from freescale_bench.train.measure import build_config
from freescale_bench.train.shapes import SHAPES, Shape

EVERY = 50  # steps between checkpoints
_WARMUP = 100  # steps, by which every size of batch has its CUDA graph
_SMALL = Shape("small", 8, 32, 1, 2, cap=60, median=40, negatives=2)
_ROW_NUMBERS = 3  # of each column of a row: its value and both of Adam's moments
_BATCHES = EVERY  # that come again: each turn has the same
_LIMIT = 600.0  # seconds of a collective


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: str
    state: float  # GB of a rank
    turns: int

    def make_shape(self, ranks: int) -> Shape:
        """The long shape of `freescale bench train` on GPUs, half of its batch on each: they may
        share one."""
        shape = replace(SHAPES["long"], samples=8) if self.device == "cuda" else _SMALL
        items = int(self.state * 1e9 / (shape.width * 4 * _ROW_NUMBERS)) * ranks - 1
        return replace(shape, items=items, samples=shape.samples * ranks, batches=_BATCHES, users=0)


@dataclass(frozen=True)
class Turn:
    """`EVERY` steps."""

    seconds: float
    disk: float  # seconds of them after the last step, until the checkpoint was on the disk
    steps_ms: list[float]  # each, for the host; the second has what saving takes of the main thread
    save_ms: float  # of it


class Measured:
    """A rank that trains as `freescale train` does, and saves."""

    def __init__(self, plan: Plan, transport: Transport, folder: Path) -> None:
        """Writes the data, on the first rank. A collective."""
        self.transport = transport
        shape, file = plan.make_shape(transport.world), folder / "interactions.parquet"
        if transport.rank == 0:
            write_interactions(shape, file)
        transport.gather_bytes(b"")
        config: RunConfig = build_config(shape, file, folder / "cache", plan.device, 10**6)
        config = replace(
            config,
            data=replace(config.data, num_items=shape.items + 1),
            train=replace(config.train, placement="sharded"),
        )
        data = load_histories(config, prepare_data(config), transport)
        batches = [data.batch(number) for number in range(_BATCHES)]
        if plan.device == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        self.model = build_model(config, data, transport)
        self.optimizer = build_optimizer(config, self.model)
        self.pipeline = build_pipeline(config, self.model, self.optimizer, 10**6)
        self.checkpoints = Checkpoints(folder / "checkpoints", transport, asynchronous=True)
        self._steps = self.pipeline.run(itertools.cycle(batches))

    def make_steps(self, count: int) -> list[float]:
        """Returns when each was over, for the host."""
        ends = []
        for _ in range(count):
            next(self._steps)
            ends.append(time.perf_counter())
        self.pipeline.ledger.drain()
        return ends

    def time_turn(self, save: bool) -> Turn:
        """A collective."""
        self._synchronize()
        begin = time.perf_counter()
        ends = self.make_steps(1)
        if save:
            progress = {"step": self.pipeline.steps}
            self.checkpoints.save(self.model, self.optimizer, progress, self.pipeline.reducer)
        saved = time.perf_counter()
        ends += self.make_steps(EVERY - 1)
        self._synchronize()
        trained = time.perf_counter()
        if save:
            self.checkpoints.wait()
            self._synchronize()
        end = time.perf_counter()
        each = [1e3 * (after - before) for before, after in itertools.pairwise([begin, *ends])]
        return Turn(end - begin, end - trained, each, 1e3 * (saved - ends[0]))

    def is_exact(self) -> bool:
        """Saves, damages the rows in memory and loads: whether they are what they were. A
        collective."""
        self.pipeline.flush()
        progress = {"step": self.pipeline.steps}
        self.checkpoints.save(self.model, self.optimizer, progress, self.pipeline.reducer)
        self.checkpoints.wait()
        rows = self.model.tables.get_local_state("item")
        expected = {name: value.clone() for name, value in rows.items()}
        for value in rows.values():
            value.zero_()
        self.checkpoints.load(self.checkpoints.find("last"), self.model, self.optimizer)
        found = self.model.tables.get_local_state("item")
        equal = all(torch.equal(value, expected[name]) for name, value in found.items())
        return all(part == b"1" for part in self.transport.gather_bytes(b"1" if equal else b"0"))

    def _synchronize(self) -> None:
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize()
        self.transport.gather_bytes(b"")


def bench_training(plan: Plan, to: Destination) -> None:
    """As one of the ranks."""
    transport = join(plan.device, _LIMIT, "auto")
    with tempfile.TemporaryDirectory() as temporary:
        # rank 0's, which all ranks of the machine use
        folder = Path(transport.gather_bytes(temporary.encode())[0].decode())
        measured = Measured(plan, transport, folder)
        measured.make_steps(_WARMUP)
        measured.time_turn(save=True)  # makes what later ones use again
        turns: dict[bool, list[Turn]] = {False: [], True: []}
        for number in range(plan.turns):
            for save in (False, True) if number % 2 else (True, False):
                turn = measured.time_turn(save)
                turns[save].append(turn)
                if transport.rank == 0:
                    late = f", {turn.disk:.3f} of them for the disk" if save else ""
                    word = "with" if save else "without"
                    print(f"{word}: {turn.seconds:.3f} s{late}", flush=True)
                    print("  steps", *(f"{ms:.0f}" for ms in turn.steps_ms), "ms", flush=True)
        row = _describe(turns, measured.is_exact())
        transport.gather_bytes(b"")
    if transport.rank == 0:
        _write(plan, transport, row, to)
    measured.pipeline.close()
    transport.close()


def _describe(turns: dict[bool, list[Turn]], exact: bool) -> Row:
    without, saved = ([turn.seconds for turn in turns[save]] for save in (False, True))
    ratios = [more / less for more, less in zip(saved, without, strict=True)]
    return {
        "arm": "with checkpoints beside without",
        "step_ms": spread([1e3 * each / EVERY for each in without]),
        "step_ms_with_checkpoints": spread([1e3 * each / EVERY for each in saved]),
        "more_percent": 100 * (sum(saved) / sum(without) - 1),
        "median_more_percent": 100 * (statistics.median(ratios) - 1),
        "turns_more_percent": [100 * (ratio - 1) for ratio in ratios],
        "waited_for_disk_s": [turn.disk for turn in turns[True]],
        "save_ms": [turn.save_ms for turn in turns[True]],
        "steps_ms": _average_steps(turns[False]),
        "steps_ms_with_checkpoints": _average_steps(turns[True]),
        "restored_exactly": exact,
    }


def _average_steps(turns: list[Turn]) -> list[float]:
    """[EVERY]: the median over the turns of each step."""
    return [
        round(statistics.median(step), 3)
        for step in zip(*(turn.steps_ms for turn in turns), strict=True)
    ]


def _write(plan: Plan, transport: Transport, row: Row, to: Destination) -> None:
    share = f"{plan.state:g} GB of state a rank, {transport.world} ranks"
    steps = EVERY * plan.turns
    claims = [
        claim(
            f"wall time of {steps} steps with a checkpoint every {EVERY}, beside without: {share}",
            0.5,
            row["more_percent"],
            "% longer",
            at_least=False,
        ),
        claim(
            "the last checkpoint has the bits of the trained table and its row state (1: all)",
            1.0,
            float(row["restored_exactly"]),
            "",
            at_least=True,
        ),
    ]
    about: dict[str, Any] = asdict(plan) | {"ranks": transport.world, "row_optimizer": "adam"}
    about["shape"] = plan.make_shape(transport.world).describe()
    testbed = f"{transport.world}ranks-{get_gpu_name()}" if plan.device == "cuda" else "cpu"
    command = f"freescale bench checkpoint training --device {plan.device}"
    command += f" --nproc {transport.world} --state {plan.state:g} --turns {plan.turns}"
    write("checkpoint-training", testbed, command, [row], claims, to=to, workload=about)
