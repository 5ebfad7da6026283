"""Dense gradients in a few flat buffers, so that few large AllReduces carry them, each from when its last gradient is there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from freescale.pipeline.flat import FlatGradients
from freescale.transport.api import Handle, Transport

_MOST_BYTES = 25 << 20
_LEAST_BYTES = 2 << 20  # below, a message is mostly latency
_BUCKETS = 4  # at least, where they are large enough: a backward has something to hide the first ones behind


class GradientBuckets(FlatGradients):
    """Each of `flat` is a bucket, an AllReduce of its own.

    Parameters that a rank's batch did not reach count as zero, so that all ranks reduce the same buffers; one further message
    carries the step's summed losses. The order is the same on every rank, whatever it computes: losses, then the buckets, at first
    from the model's last parameters to its first. A backward may reach them in another order; the first one shows it, and from then
    on they leave in that. What a bucket holds, and so every bit of a sum, does not depend on it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.flat = []
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in reversed(self.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        views: dict[int, Tensor] = {}
        self._members: list[set[int]] = []  # of each bucket: parameters by number
        numbers = {id(p): number for number, p in enumerate(self.parameters)}
        for dtype, members in by_dtype.items():
            for bucket in _cut(members):
                flat = torch.zeros(sum(p.numel() for p in bucket), dtype=dtype, device=device)
                self.flat.append(flat)
                pieces = flat.split([p.numel() for p in bucket])
                views |= {id(p): piece.view_as(p) for p, piece in zip(bucket, pieces, strict=True)}
                self._members.append({numbers[id(p)] for p in bucket})
        self._views = [views[id(p)] for p in self.parameters]
        self._bucket = {number: index for index, members in enumerate(self._members) for number in members}
        self._lacking: list[set[int]] = []  # of each bucket: parameters whose gradient is not there yet; empty while nobody asks
        self._summed: Handle | None = None
        self._handles: list[Handle] = []
        self._transport: Transport | None = None
        self._order = list(range(len(self.flat)))  # in which the buckets leave
        self._came: list[int] | None = []  # buckets, as a backward completed them; None once that is agreed on
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._there, number))

    def start(self, transport: Transport, losses: Tensor) -> None:
        """Before the last backward of a step: each bucket leaves as soon as its gradients are there. losses [tasks], summed too."""
        self._transport, self._lacking = transport, [set(members) for members in self._members]
        self._summed, self._handles = transport.all_reduce(losses, "dense"), []

    def send(self) -> None:
        """The buckets that have not left yet: all, on a rank without a batch. Before any other collective of this transport."""
        self._lacking = []
        self._leave()

    def reduce(self) -> Tensor:
        """Waits for the sums of gradients, in place, and losses; returns the summed losses."""
        self._check_attached()
        assert self._summed is not None and len(self._handles) == len(self.flat), "the buckets were not sent"
        for handle in self._handles:
            handle.wait()
        summed = self._summed.wait()
        if self._came is not None and len(self.flat) > 1:
            self._agree(self._came)
        self._summed = self._transport = None
        self._handles = []
        return summed

    def _agree(self, came: list[int]) -> None:
        """On the order that the first rank with a batch saw. A collective, once: some rank has a batch in every step, so that where
        none saw an order the gradients do not leave during the backward (serial), and it does not matter."""
        assert self._transport is not None
        seen = [json.loads(order) for order in self._transport.gather_bytes(json.dumps(came).encode())]
        order: list[int] = next((order for order in seen if order), [])
        self._order = order + [bucket for bucket in range(len(self.flat)) if bucket not in order]
        self._came = None

    def _there(self, number: int, parameter: Tensor) -> None:
        if not self._lacking:
            return
        bucket = self._bucket[number]
        if number not in self._lacking[bucket]:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient twice in one backward, and may have been sent in "
                "between: activation checkpointing must be torch's, with use_reentrant=False"
            )
        self._lacking[bucket].discard(number)
        if self._came is not None and not self._lacking[bucket]:
            self._came.append(bucket)
        self._leave()

    def _leave(self) -> None:
        """Buckets whose gradients are all there, in their order."""
        assert self._transport is not None
        for bucket in self._order[len(self._handles) :]:
            if self._lacking and self._lacking[bucket]:
                return
            self._handles.append(self._transport.all_reduce(self.flat[bucket], "dense"))


def largest_bucket(total: int) -> int:
    """Bytes, of so many in all."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, total // _BUCKETS))


def _cut(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    sizes = [p.numel() * p.element_size() for p in parameters]
    most = largest_bucket(sum(sizes))
    buckets: list[list[nn.Parameter]] = []
    filled = most + 1
    for parameter, size in zip(parameters, sizes, strict=True):
        if filled + size > most:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += size
    return buckets
