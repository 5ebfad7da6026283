"""Dense gradients in a few flat buffers: few large AllReduces carry them, and each starts as soon
as its last gradient is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from freescale.pipeline.dense.partitioned import PartitionedAllReduce
from freescale.pipeline.dense.reducer import Reducer
from freescale.sequences import has_positions
from freescale.transport.api import Handle, Transport, gather_json

_MOST_BYTES = 25 << 20
# below, a message is mostly latency: NCCL's kernels wait for each other, gloo's threads wake up
_LEAST_BYTES = {"cpu": 256 << 10, "cuda": 2 << 20}
# at least, if they are large enough: the backward can hide the first ones
_BUCKETS = 4
# Marks in front of the last bucket come in so many numbers, so that its gradients are aligned.
_ALIGNED = 64


class GradientBuckets(Reducer):
    """Each of `flat` is a bucket, an AllReduce of its own.

    Parameters that a rank's batch did not use count as zero, so that all ranks reduce the same
    buffers; one further message carries the step's summed losses. The order is the same on every
    rank, whatever it computes: losses, then the buckets.

    A parameter that no rank has used has no gradient after `reduce`, as in plain torch: optimizers
    leave it alone. Marks in front of the last bucket, which leaves when all uses are known, say
    which were used. Only a rank that lacks a gradient reads their sums: on a GPU it waits for them.

    The first backward decides which parameters share a bucket: those whose gradients came one after
    another. It sends nothing before it has ended; each later one sends a bucket as soon as it is
    complete. Where the order of a backward depends on its batch, another batch would give other
    buckets, and sums in another order: `order` is part of a pipeline's state, for the run that
    resumes. Rows of positions that no sample of the step has are not sent.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._device = device
        # sums in place of the transport; it is set between two steps
        self.summing: PartitionedAllReduce | None = None
        # of each bucket: parameters whose gradient is not there yet; empty while nobody asks
        self._lacking: list[set[int]] = []
        self._hooked = False  # the backward tells which gradients are there
        self._used: set[Tensor] = set()  # parameters that got a gradient in this step
        self._unused: list[int] = []  # the others, by number, once the backward is over
        self._summed: Handle | None = None
        self._handles: list[Handle] = []
        self._longest: int | None = None  # sequence of the step's global batch
        self._sums: Transport | PartitionedAllReduce | None = None
        # parameters by number, as the first backward reached them; None once all know
        self._came: dict[int, None] | None
        self.adopt_order(None)

    @contextmanager
    def watch_backward(self) -> Iterator[None]:
        """Around a run: hooks tell which gradients are there, unless one bucket has them all and
        leaves with the last. What a run left behind that failed in its backward is forgotten."""
        self._lacking, self._summed, self._handles, self._sums = [], None, [], None
        self._came = None if self._came is None else {}
        self._hooked = len(self.flat) > 1
        hooks = [
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._mark_ready, number)
            )
            for number, p in enumerate(self.parameters if self._hooked else ())
        ]
        try:
            yield
        finally:
            self._hooked = False
            for hook in hooks:
                hook.remove()

    def clear(self) -> None:
        """Before the first backward of a step. Without hooks, gradients stay where the backward
        puts them until `send`: that shows which there are."""
        if self._hooked:
            super().clear()
        else:
            for parameter in self.parameters:
                parameter.grad = None
        self._marks.fill_(1)
        self._used.clear()

    @property
    def order(self) -> list[int] | None:
        """Parameters by number, as they were divided; None before the first backward has shown
        it."""
        return self._order if self._came is None else None

    def adopt_order(self, order: Sequence[int] | None) -> None:
        """Between two steps, the same on every rank: divides as an earlier run, which had that
        `order`, or by the next backward."""
        self._divide(list(reversed(range(len(self.parameters)))) if order is None else list(order))
        several = len(self.flat) > len({p.dtype for p in self.parameters})
        self._came = {} if order is None and several else None

    def _divide(self, order: list[int]) -> None:
        """Into buckets, in that order of the parameters."""
        self._order = order
        self.flat = []
        self._buffers: list[Tensor] = []  # of each bucket, as it leaves
        self._members: list[set[int]] = []  # of each bucket: parameters by number
        self._last: list[int] = []  # of each bucket: the parameter at its end
        views: dict[int, Tensor] = {}
        buckets = [
            bucket
            for dtype in dict.fromkeys(self.parameters[number].dtype for number in order)
            for bucket in self._cut([n for n in order if self.parameters[n].dtype == dtype])
        ]
        marks = -(-len(order) // _ALIGNED) * _ALIGNED
        for bucket in buckets:
            # at the end: what a batch does not reach can be left out
            bucket.sort(key=lambda number: has_positions(self.parameters[number]))
            self._last.append(bucket[-1])
            sizes = [self.parameters[number].numel() for number in bucket]
            ahead = marks if bucket is buckets[-1] else 0
            dtype = self.parameters[bucket[0]].dtype
            buffer = torch.zeros(ahead + sum(sizes), dtype=dtype, device=self._device)
            self._buffers.append(buffer)
            self.flat.append(buffer[ahead:])
            views |= dict(zip(bucket, torch.split(self.flat[-1], sizes), strict=True))
            self._members.append(set(bucket))
        # of each parameter, how many ranks have used it; before the sum 0 or 1
        self._marks = self._buffers[-1][:marks].fill_(1) if buckets else torch.ones(0)
        self._views = [
            views[number].view_as(parameter) for number, parameter in enumerate(self.parameters)
        ]
        self._bucket = {
            number: index for index, members in enumerate(self._members) for number in members
        }

    def _cut(self, numbers: list[int]) -> list[list[int]]:
        """Cuts parameters into buckets. One below the smallest size takes the next parameter,
        however large; the last joins the one before it."""
        sizes = [
            self.parameters[number].numel() * self.parameters[number].element_size()
            for number in numbers
        ]
        least = _LEAST_BYTES[self._device.type]
        most = compute_bucket_limit(sum(sizes), self._device.type)
        buckets: list[list[int]] = []
        filled = most
        for number, size in zip(numbers, sizes, strict=True):
            if filled >= least and filled + size > most:
                buckets.append([])
                filled = 0
            buckets[-1].append(number)
            filled += size
        if filled < least and len(buckets) > 1:
            last = buckets.pop()
            buckets[-1] += last
        return buckets

    def start(self, transport: Transport, losses: Tensor, longest: int | None = None) -> None:
        """Before the last backward of a step: each bucket leaves as soon as its gradients are
        there. losses [tasks], summed too. `longest`, the same on every rank: rows of later
        positions are zero on all of them, and stay where they are."""
        self._longest = longest
        self._sums = self.summing or transport
        self._lacking = [set(members) for members in self._members]
        self._summed, self._handles = self._sums.all_reduce(losses, "dense"), []

    def send(self) -> None:
        """The buckets that have not left yet: all, on a rank without a batch. Before any other
        collective of this transport."""
        if not self._hooked:
            self._used.update(self._collect())
            self._attach()
        self._check_attached()
        if self._came is not None:
            self._agree_on_order(self._came)
        self._mark_unused()
        self._lacking = []
        self._send_ready()

    def _mark_unused(self) -> None:
        """If all are used, the last bucket may have left, with the marks as they are."""
        self._unused = []
        if len(self._used) < len(self.parameters):
            used = [parameter in self._used for parameter in self.parameters]
            self._marks[: len(used)] = torch.tensor(used)
            self._unused = [number for number, is_used in enumerate(used) if not is_used]

    def reduce(self) -> Tensor:
        """Waits for the sums of gradients, in place, and losses; returns the summed losses.
        Parameters that no rank has used have no gradient then."""
        self._check_attached()
        assert self._summed is not None and len(self._handles) == len(self.flat), (
            "the buckets were not sent"
        )
        for handle in self._handles:
            handle.wait()
        summed = self._summed.wait()
        self._summed = self._sums = None
        self._handles = []
        if self._unused:
            anywhere = (self._marks != 0).tolist()
            for number in self._unused:
                if not anywhere[number]:
                    self.parameters[number].grad = None
        return summed

    def _agree_on_order(self, came: dict[int, None]) -> None:
        """On the order that the first rank with a batch saw: some rank has one in every step. A
        collective, once."""
        assert self._sums is not None
        seen: list[list[int]] = gather_json(self._sums, list(came))
        order = dict.fromkeys(next((order for order in seen if order), []))
        gradients = self._views
        others = [n for n in reversed(range(len(self.parameters))) if n not in order]
        self._divide([*order, *others])
        for parameter, gradient, view in zip(self.parameters, gradients, self._views, strict=True):
            parameter.grad = view.copy_(gradient)
        self._came = None

    def _mark_ready(self, number: int, parameter: Tensor) -> None:
        self._used.add(parameter)
        if self._came is not None:
            self._came[number] = None
        if not self._lacking:
            return
        bucket = self._bucket[number]
        if number not in self._lacking[bucket]:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient twice in one "
                "backward, and may have been sent in between: activation checkpointing must be "
                "torch's, with use_reentrant=False"
            )
        self._lacking[bucket].discard(number)
        if self._came is None:
            self._send_ready()

    def _send_ready(self) -> None:
        """Sends the buckets whose gradients are all there, in their order."""
        assert self._sums is not None
        for bucket in range(len(self._handles), len(self.flat)):
            if self._lacking and self._lacking[bucket]:
                return
            self._handles.append(self._sums.all_reduce(self._select_reached(bucket), "dense"))

    def _select_reached(self, bucket: int) -> Tensor:
        """[n]: a bucket up to the last position that the global batch reaches."""
        buffer, last = self._buffers[bucket], self.parameters[self._last[bucket]]
        if self._longest is None or not has_positions(last):
            return buffer
        later = max(0, last.shape[0] - (self._longest + 1))
        return buffer[: buffer.numel() - later * last[0].numel()]


def compute_bucket_limit(total: int, device: str = "cuda") -> int:
    """The largest size of a bucket in bytes, for `total` bytes of gradients."""
    return min(_MOST_BYTES, max(_LEAST_BYTES[device], total // _BUCKETS))
