"""Dense gradients in a few flat buffers, so that few large AllReduces carry them, each from when
its last gradient is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from freescale.pipeline.dense.flat import FlatGradients
from freescale.pipeline.dense.partitioned import PartitionedAllReduce
from freescale.transport.api import Handle, Transport

_MOST_BYTES = 25 << 20
# below, a message is mostly latency: NCCL's kernels wait for each other
_LEAST_BYTES = {"cpu": 64 << 10, "cuda": 2 << 20}
# at least, where they are large enough: a backward has something to hide the first ones behind
_BUCKETS = 4


class GradientBuckets(FlatGradients):
    """Each of `flat` is a bucket, an AllReduce of its own.

    Parameters that a rank's batch did not reach count as zero, so that all ranks reduce the same
    buffers; one further message carries the step's summed losses. The order is the same on every
    rank, whatever it computes: losses, then the buckets. Which parameters make a bucket is found in
    the first backward: those whose gradients came one after another. It sends nothing before it has
    ended; each later one sends a bucket as soon as it is complete. Where a backward's order depends
    on its batch, another would divide otherwise, and sum in another order: `order` is part of a
    pipeline's state, for the run that resumes.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        summing: PartitionedAllReduce | None = None,
    ) -> None:
        """`summing` sums instead of the transport."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self._device, self._summing = device, summing
        # of each bucket: parameters whose gradient is not there yet; empty while nobody asks
        self._lacking: list[set[int]] = []
        self._summed: Handle | None = None
        self._handles: list[Handle] = []
        self._sums: Transport | PartitionedAllReduce | None = None
        # parameters by number, as the first backward reached them; None once all know
        self._came: dict[int, None] | None
        self.adopt_order(None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a run: hooks tell which gradients are there. What a run left behind that failed in
        its backward is forgotten."""
        self._lacking, self._summed, self._handles, self._sums = [], None, [], None
        self._came = None if self._came is None else {}
        hooks = [
            p.register_post_accumulate_grad_hook(partial(self._there, number))
            for number, p in enumerate(self.parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

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
        self._members: list[set[int]] = []  # of each bucket: parameters by number
        views: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(self.parameters[number].dtype for number in order):
            for bucket in self._cut(
                [number for number in order if self.parameters[number].dtype == dtype]
            ):
                sizes = [self.parameters[number].numel() for number in bucket]
                self.flat.append(torch.zeros(sum(sizes), dtype=dtype, device=self._device))
                views |= dict(zip(bucket, self.flat[-1].split(sizes), strict=True))
                self._members.append(set(bucket))
        self._views = [
            views[number].view_as(parameter) for number, parameter in enumerate(self.parameters)
        ]
        self._bucket = {
            number: index for index, members in enumerate(self._members) for number in members
        }

    def _cut(self, numbers: list[int]) -> list[list[int]]:
        """None below the least: it takes the next parameter, however large, and the last joins the
        one before it."""
        sizes = [
            self.parameters[number].numel() * self.parameters[number].element_size()
            for number in numbers
        ]
        least, most = _LEAST_BYTES[self._device.type], largest_bucket(sum(sizes), self._device.type)
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

    def start(self, transport: Transport, losses: Tensor) -> None:
        """Before the last backward of a step: each bucket leaves as soon as its gradients are
        there. losses [tasks], summed too."""
        self._sums = self._summing or transport
        self._lacking = [set(members) for members in self._members]
        self._summed, self._handles = self._sums.all_reduce(losses, "dense"), []

    def send(self) -> None:
        """The buckets that have not left yet: all, on a rank without a batch. Before any other
        collective of this transport."""
        self._check_attached()
        if self._came is not None:
            self._agree(self._came)
        self._lacking = []
        self._leave()

    def reduce(self) -> Tensor:
        """Waits for the sums of gradients, in place, and losses; returns the summed losses."""
        self._check_attached()
        assert self._summed is not None and len(self._handles) == len(self.flat), (
            "the buckets were not sent"
        )
        for handle in self._handles:
            handle.wait()
        summed = self._summed.wait()
        self._summed = self._sums = None
        self._handles = []
        return summed

    def _agree(self, came: dict[int, None]) -> None:
        """On the order that the first rank with a batch saw: some rank has one in every step. A
        collective, once."""
        assert self._sums is not None
        seen: list[list[int]] = [
            json.loads(order) for order in self._sums.gather_bytes(json.dumps(list(came)).encode())
        ]
        order = dict.fromkeys(next((order for order in seen if order), []))
        gradients = self._views
        self._divide(
            [
                *order,
                *(
                    number
                    for number in reversed(range(len(self.parameters)))
                    if number not in order
                ),
            ]
        )
        for parameter, gradient, view in zip(self.parameters, gradients, self._views, strict=True):
            parameter.grad = view.copy_(gradient)
        self._came = None

    def _there(self, number: int, parameter: Tensor) -> None:
        if self._came is not None:
            self._came[number] = None
        if not self._lacking:
            return
        bucket = self._bucket[number]
        if number not in self._lacking[bucket]:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient twice in one "
                "backward, and may have been sent in "
                "between: activation checkpointing must be torch's, with use_reentrant=False"
            )
        self._lacking[bucket].discard(number)
        if self._came is None:
            self._leave()

    def _leave(self) -> None:
        """Buckets whose gradients are all there, in their order."""
        assert self._sums is not None
        for bucket in range(len(self._handles), len(self.flat)):
            if self._lacking and self._lacking[bucket]:
                return
            self._handles.append(self._sums.all_reduce(self.flat[bucket], "dense"))


def largest_bucket(total: int, device: str = "cuda") -> int:
    """Bytes, of so many in all."""
    return min(_MOST_BYTES, max(_LEAST_BYTES[device], total // _BUCKETS))
