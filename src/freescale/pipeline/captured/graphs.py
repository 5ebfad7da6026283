"""The CUDA graphs of a run: forward and backward of one rank's step, with the reading of its rows.

A batch that is small enough is padded to one of a few sizes (sizes.py), always: what is computed
depends on the batch alone. From its second batch on, a size has a graph, which one launch replays;
before, the same work is launched kernel by kernel. Gradients are at fixed places, where the next
batch of the size overwrites them: they are used up within the step. The updates of rows and
parameters, which depend on the number of the step, follow outside the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from freescale.batch import SequenceBatch
from freescale.embedding.groups.local import Collected
from freescale.kernels.dispatch.versions import has_triton
from freescale.models.columns import measure_time_span
from freescale.pipeline.agreement import Agreement
from freescale.pipeline.captured.sizes import choose_size
from freescale.pipeline.captured.static_batch import StaticBatch, can_pad
from freescale.pipeline.first_batch import check_losses
from freescale.pipeline.precision import hold_matmul_precision
from freescale.streams import current_stream

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
