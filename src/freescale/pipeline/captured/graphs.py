"""The CUDA graphs of a run: forward and backward of one rank's step, with the reading of its rows.

A batch that is small enough is padded to one of a few sizes (sizes.py), always: what is computed
depends on the batch alone. From its second batch on, a size has a graph, which one launch replays;
before, the same work is launched kernel by kernel. Gradients are at fixed places, where the next
batch of the size overwrites them: they are used up within the step. The updates of rows and
parameters, which depend on the number of the step, follow outside the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.batch import Jagged, SequenceBatch
from freescale.embedding.groups.local import Collected
from freescale.kernels.attention.plan_columns import PAIR_QUERIES, TileColumn
from freescale.kernels.attention.triton_plan import TilePlan, subtract_first
from freescale.kernels.dispatch.versions import has_triton
from freescale.kernels.upload import upload
from freescale.models.columns import measure_time_span
from freescale.pipeline.agreement import Agreement
from freescale.pipeline.captured.sizes import StaticSize, choose_size, pad_lengths
from freescale.pipeline.first_batch import check_losses
from freescale.pipeline.precision import hold_matmul_precision
from freescale.streams import current_stream


@dataclass(frozen=True)
class StaticPlan(TilePlan):
    """A plan whose tables fit any batch of the size with histories up to `longest_history`. Unused
    rows are tiles without tokens."""

    timestamps: Tensor | None = None  # [tokens] int64, the source of `times`

    @staticmethod
    def of(plan: TilePlan, longest: int, timestamps: Tensor | None) -> StaticPlan:
        """Makes the plan from that of the first batch."""
        own = {field.name: getattr(plan, field.name) for field in fields(TilePlan)}
        limits = {"longest_history": longest, "longest_distance": longest}
        return StaticPlan(**own | limits | {"kept": {}}, timestamps=timestamps)

    @property
    def pair_blocks(self) -> int:
        of_queries = self.tokens // PAIR_QUERIES + len(self.host)
        return of_queries * (self.longest_history // PAIR_QUERIES + 2)

    def _keep(self, key: tuple[str, int]) -> tuple[Tensor, ...]:
        tables: tuple[Tensor, ...] | None = self.kept.get(key)
        if tables is None:
            made, device = self.compute_tables(key), self.lengths.device
            tables = self.kept[key] = tuple(
                torch.zeros(rows, *table.shape[1:], dtype=torch.int32, device=device)
                for table, rows in zip(made, self._count_rows(key), strict=True)
            )
            self._write(key, tables, made)
        return tables

    def _count_rows(self, key: tuple[str, int]) -> tuple[int, ...]:
        """Most rows of the tables of a (kind, tile size)."""
        (of, size), samples = key, len(self.host)
        if of == "samples":
            return (samples,)
        return (self.tokens // size + samples,)

    def count_sums(self, size: int) -> int:
        of_longest = -(-self.longest_history // size) * size
        return (self.tokens // size + len(self.host)) * of_longest

    def refill(self, lengths: np.ndarray) -> None:
        """Refills the tables for a batch of the same size whose tokens are in place, on the current
        stream."""
        other = replace(self, host=lengths, history=lengths, kept={})
        for key, tables in self.kept.items():
            if key != "edges":
                self._write(key, tables, other.compute_tables(key))
        if self.times is not None:
            assert self.timestamps is not None
            span = 0 if self.times.dtype == torch.int32 else 2**62
            self.times.copy_(subtract_first(self.timestamps, self.lengths, span))

    def _write(
        self, key: tuple[str, int], tables: tuple[Tensor, ...], made: tuple[np.ndarray, ...]
    ) -> None:
        for table, values in zip(tables, made, strict=True):
            whole = np.zeros(table.shape, np.int32)
            whole[: len(values)] = values
            lacking = whole[len(values) :]
            if key[0] in ("queries", "keys"):
                lacking[:, TileColumn.START] = 1  # kernels read the time at START + LENGTH - 1
            table.copy_(upload(whole, table.device), non_blocking=True)


class StaticPlans:
    """The plans that a model makes for batches of one size."""

    def __init__(self, longest: int) -> None:
        """`longest`: most tokens of a sample."""
        self._longest = longest
        self._plans: dict[Any, StaticPlan] = {}

    def find(self, key: Any, make: Callable[[], TilePlan], timestamps: Tensor | None) -> StaticPlan:
        """The plan of this key. The first call makes it from `make()`."""
        if key not in self._plans:
            self._plans[key] = StaticPlan.of(make(), self._longest, timestamps)
        return self._plans[key]

    def refill(self, lengths: np.ndarray) -> None:
        """Refills all plans for a batch of the same size whose tokens are in place."""
        for plan in self._plans.values():
            plan.refill(lengths)


WEIGHTS = "target_weights"  # of the tokens: those of filling samples are 0


def can_pad(batch: SequenceBatch) -> bool:
    """Whether all features of a batch are of samples or of the events of their histories, so that
    filling samples can be added."""
    parts = list(batch.sequences.values())
    if not parts or batch.candidates or any(part.host is None for part in parts):
        return False
    first = parts[0].host_lengths
    return all(
        part.host_lengths is first or torch.equal(part.host_lengths, first) for part in parts
    )


class StaticBatch:
    """The batch that a model sees in place of batches of one size.

    Filling samples have values of -1, which as ids name no row, and a weight of 0.
    """

    def __init__(
        self, size: StaticSize, like: SequenceBatch, longest: int, span: int | None = None
    ) -> None:
        """
        Args:
            like: a batch of this size, which has the same features as all others.
            longest: tokens that a sample may have.
            span: most that two timestamps of a sample may differ by.
        """
        self.size, device = size, like.device
        self._lengths = torch.zeros(size.samples, dtype=torch.int64, device=device)
        self._numbers = torch.arange(size.tokens, device=device)
        self._staging = torch.zeros(size.samples + 1, dtype=torch.int64)
        self._staged = torch.zeros(size.samples + 1, dtype=torch.int64, device=device)
        self._free: torch.cuda.Event | None = None  # of the last copy out of `_staging`
        if device.type == "cuda":
            self._staging = self._staging.pin_memory()
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.host_lengths = torch.zeros(size.samples, dtype=torch.int64)
        self._plans = StaticPlans(max(longest, size.filler))
        # one object, which `fill` changes: the model reads the sizes from it
        self._host = Jagged(
            torch.zeros(size.tokens, dtype=torch.int8), self.host_lengths, plans=self._plans
        )

        def widen(values: Tensor, count: int) -> Tensor:
            # ids of -1 name no row
            shape = count, *values.shape[1:]
            return torch.full(shape, -1, dtype=values.dtype, device=device)

        sequences = {
            name: Jagged(widen(part.values, size.tokens), self._lengths, self._host)
            for name, part in like.sequences.items()
        }
        if "timestamps" in sequences:
            host = replace(self._host, span=span)
            sequences["timestamps"] = replace(sequences["timestamps"], host=host)
        if WEIGHTS not in sequences:
            weights = torch.zeros(size.tokens, device=device)
            sequences[WEIGHTS] = Jagged(weights, self._lengths, self._host)
        self.batch = replace(
            like,
            sequences=sequences,
            dense={name: widen(part, size.samples) for name, part in like.dense.items()},
            weights={},
            shared={name: part.clone() for name, part in like.shared.items()},
            keys=None if like.keys is None else widen(like.keys, size.samples),
        )

    def fill(self, batch: SequenceBatch) -> None:
        """Copies a batch into it, on the current stream. The host does not wait."""
        size = self.size
        host = next(iter(batch.sequences.values())).host_lengths
        tokens = int(host.sum())
        padded = torch.from_numpy(pad_lengths(host.numpy().astype(np.int64), size))
        self.host_lengths.copy_(padded)
        if self._free is not None:
            self._free.synchronize()  # of the copy before: long over
        self._staging[:-1] = padded
        self._staging[-1] = tokens
        self._staged.copy_(self._staging, non_blocking=True)
        if self._free is not None:
            self._free.record()
        self._lengths.copy_(self._staged[:-1])
        copies: list[tuple[Tensor, Tensor]] = []  # into, source
        own = self.batch.sequences
        for name, part in batch.sequences.items():
            own[name].values[tokens:].fill_(-1)
            copies.append((own[name].values[:tokens], part.values))
        copies += [(self.batch.dense[n][: size.real], part) for n, part in batch.dense.items()]
        copies += [(self.batch.shared[n], part) for n, part in batch.shared.items()]
        if batch.keys is not None and self.batch.keys is not None:
            copies.append((self.batch.keys[: size.real], batch.keys))
        into, source = zip(*copies, strict=True)
        torch._foreach_copy_(into, source)
        self._plans.refill(padded.numpy())
        real = self._numbers < self._staged[-1]
        weights = own[WEIGHTS].values
        if WEIGHTS in batch.sequences:
            weights.mul_(real)
        else:
            weights.copy_(real)


if TYPE_CHECKING:
    from freescale.pipeline.schedule import Schedule

_LAUNCHED = 1  # batches of a size before it has a graph: rare sizes need none
_MOST_GRAPHS = 64
# values of a layer's tokens, over all layers: beyond, kernels take longer than their launches
_MOST_WORK = 100_000_000


def can_capture(module: nn.Module) -> bool:
    """Whether a model can be captured: it is marked as capturable, and its kernels run on a GPU."""
    return has_triton() and getattr(module, "capturable", False)


class Graphs:
    """By the size of the batch."""

    def __init__(self, schedule: Schedule, replays: bool = True) -> None:
        """`replays`: False launches the same work kernel by kernel, always: the oracle."""
        self._schedule, self._replays = schedule, replays
        self._steps: dict[Any, StaticStep] = {}
        # memory that all graphs share: one of them runs at a time
        self.pool: Any = torch.cuda.graph_pool_handle()
        device = schedule.transport.device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def find(self, batch: SequenceBatch) -> StaticStep | None:
        """The work on batches of this size; None where a batch is computed as it is."""
        module: Any = self._schedule.parallel.module
        history = batch.sequences.get("history")
        if history is None or not len(batch) or not can_pad(batch):
            return None
        tokens = history.values.shape[0]
        if not tokens or module.count_work(tokens) > _MOST_WORK:
            return None
        # Launches grow with the longest history: in powers of two.
        longest = 1 << max(0, int(history.host_lengths.max()) - 1).bit_length()
        longest = min(longest, module.encoder.max_length)
        size, span = choose_size(len(batch), tokens, module.encoder.max_length), None
        if "timestamps" in batch.sequences:
            # times in 32 bits, or not
            known = measure_time_span(batch.sequences["timestamps"])
            span = 0 if known is not None and known < 2**30 else 2**62
        key = (size, longest, span, *((n, t.shape[1:]) for n, t in sorted(batch.dense.items())))
        step = self._steps.get(key)
        if step is None:
            static = StaticBatch(size, batch, longest, span)
            step = self._steps[key] = StaticStep(self._schedule, static, self)
        return step

    def has_room(self) -> bool:
        """Whether one more graph may be made."""
        return self._replays and sum(s.captured for s in self._steps.values()) < _MOST_GRAPHS


class StaticStep:
    """Forward and backward of batches of one size."""

    def __init__(self, schedule: Schedule, static: StaticBatch, graphs: Graphs) -> None:
        self._schedule, self._static, self._graphs = schedule, static, graphs
        self._parameters = [p for p in schedule.parallel.dense_parameters() if p.requires_grad]
        self._counts: Tensor | None = None  # [tasks] float32
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: tuple[list[Collected], Tensor] | None = None
        self._gradients: list[Tensor | None] = []

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def run(self, batch: SequenceBatch, agreement: Agreement) -> tuple[list[Collected], Tensor]:
        """The gradients of the rows, and the losses; parameters have their gradients."""
        self._static.fill(batch)
        self._fill_counts(agreement)
        tasks = sorted(agreement.counts)
        self._seen += 1
        if self._graph is None and self._seen > _LAUNCHED and self._graphs.has_room():
            self._capture(tasks)
        if self._graph is None:
            return self._compute(tasks)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        assert self._results is not None
        collected, losses = self._results
        return collected, losses.clone()  # the host reads them when the next step has begun

    def _fill_counts(self, agreement: Agreement) -> None:
        counts = torch.tensor(
            [float(count) for _, count in sorted(agreement.counts.items())], dtype=torch.float32
        )
        if self._counts is None:
            self._counts = counts.to(self._static.batch.device)
        else:
            self._counts.copy_(counts.pin_memory(), non_blocking=True)

    def _compute(self, tasks: list[str]) -> tuple[list[Collected], Tensor]:
        schedule, counts = self._schedule, self._counts
        assert counts is not None
        schedule.buckets.clear()
        device = schedule.transport.device
        with hold_matmul_precision(schedule.choices.precision, device):
            tables = schedule.tables
            rows = tables.local.fetch(tables.local.request([self._static.batch]))
            tables.open(rows)
            with schedule._autocast():
                sums = schedule.parallel.module(self._static.batch)
                check_losses(sums, tasks)
                # without a single weight the sum is 0, too
                means = [
                    sums[task] / counts[number].clamp(min=1e-30)
                    for number, task in enumerate(tasks)
                ]
                parts = [
                    mean * schedule.task_weights.get(task, 1.0)
                    for mean, task in zip(means, tasks, strict=True)
                ]
                total = torch.stack(parts).sum()
                losses = torch.stack([*means, total]).detach().double()
            total.backward()  # type: ignore[no-untyped-call]
            tables.close()
            return tables.local.collect(rows), losses

    def _capture(self, tasks: list[str]) -> None:
        graph, stream = torch.cuda.CUDAGraph(), self._graphs.stream
        current = current_stream(self._schedule.transport.device)
        stream.wait_stream(current)
        # Not by torch.cuda.graph, which waits for the device and empties the memory's cache.
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._graphs.pool, capture_error_mode="thread_local")
            try:
                self._results = self._compute(tasks)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._graph = graph
