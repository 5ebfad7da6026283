"""Jagged samples in padded groups of similar length.

Batched matrix products need rectangles. Padding a batch to its longest sample costs samples *
max(length)^2 in attention, groups of similar length about sum(length^2), which the load balancer
assumes too. The plan is a pure function of the lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.batch import compute_offsets, concat_ranges
from freescale.kernels.upload import upload

# The cost of one more group (a few dozen small operations) in elements of padding.
GROUP_OVERHEAD = 65536


def plan_groups(
    lengths: Sequence[int] | np.ndarray,
    cost: Callable[[np.ndarray], np.ndarray],
    budget: int,
    overhead: int = GROUP_OVERHEAD,
) -> list[np.ndarray]:
    """The sample indices of each group, longest first, without empty samples. `cost` computes the
    number of elements of samples padded to given lengths. A group's padded total stays within
    `budget`, but for a single sample, and its padding within `overhead`."""
    host = np.asarray(lengths, dtype=np.int64)
    if host.ndim != 1 or (host < 0).any():
        raise ValueError(f"lengths must be a flat list of numbers from 0 up, not {lengths!r}")
    if budget < 1:
        raise ValueError(f"the budget of a group must be at least 1 element, not {budget}")
    order = np.argsort(-host, kind="stable")
    order = order[: np.count_nonzero(host)]
    costs = np.asarray(cost(host[order]), dtype=np.int64)  # falling
    total = np.concatenate([[0], np.cumsum(costs)])
    groups = []
    start = 0
    while start < len(order):  # once per group, not per sample
        longest = int(costs[start])
        stop = min(len(order), start + max(1, budget // max(1, longest)))
        # padding of the group [start, start + n) for every n, rising with n
        padding = np.arange(1, stop - start + 1) * longest - (
            total[start + 1 : stop + 1] - total[start]
        )
        stop = start + max(1, int(np.searchsorted(padding, overhead, side="right")))
        groups.append(order[start:stop])
        start = stop
    return groups


@dataclass(frozen=True)
class Group:
    """Some samples, padded to the longest of them."""

    samples: Tensor  # [n] int64
    length: int
    tokens: Tensor  # [t] int64: index of their tokens in the jagged values, sample after sample
    slots: Tensor  # [t] int64: the place of each in [n * length]
    host: np.ndarray  # [n] lengths, on the host
    # all tokens of the batch in place, equally many per sample: nothing is gathered
    whole: bool = False

    @staticmethod
    def all(samples: int, length: int, device: torch.device) -> Group:
        """The group of a batch whose samples all have this length."""
        tokens = torch.arange(samples * length, device=device)
        numbers = torch.arange(samples, device=device)
        return Group(numbers, length, tokens, tokens, np.full(samples, length), whole=True)

    def __len__(self) -> int:
        return len(self.host)

    def pad(self, values: Tensor) -> Tensor:
        """[tokens of the batch, ...] -> [n, length, ...], padded with zeros."""
        return self.pad_own(values if self.whole else values.index_select(0, self.tokens))

    def pad_own(self, values: Tensor) -> Tensor:
        """[tokens of the group, ...] -> [n, length, ...], padded with zeros."""
        shape = (len(self), self.length, *values.shape[1:])
        if values.shape[0] == len(self) * self.length:  # all equally long
            return values.reshape(shape)
        padded = values.new_zeros(len(self) * self.length, *values.shape[1:])
        return padded.index_copy(0, self.slots, values).view(shape)

    def unpad(self, padded: Tensor) -> Tensor:
        """[n, length, ...] -> [tokens of the group, ...]."""
        flat = padded.reshape(len(self) * self.length, *padded.shape[2:])
        return flat if self.tokens.numel() == flat.shape[0] else flat.index_select(0, self.slots)

    def put(self, target: Tensor, padded: Tensor) -> None:
        """Writes [n, length, ...] to the group's tokens in [tokens of the batch, ...]."""
        values = self.unpad(padded).to(target.dtype)
        if self.whole:
            target.copy_(values)
        else:
            target.index_copy_(0, self.tokens, values)


@dataclass(frozen=True)
class Groups:
    """All groups of a batch."""

    groups: tuple[Group, ...]
    lengths: Tensor  # [samples] int64
    host: np.ndarray  # the same, on the host
    tokens: int

    @staticmethod
    def of(
        lengths: Tensor,
        cost: Callable[[np.ndarray], np.ndarray],
        budget: int,
        host: np.ndarray | None = None,
    ) -> Groups:
        """Groups a batch. Reads the lengths from the device unless `host` has them."""
        if lengths.dtype != torch.int64 or lengths.ndim != 1:
            raise ValueError(
                f"lengths must be a 1-d int64 tensor, not {lengths.dtype} with {lengths.ndim} axes"
            )
        host = lengths.detach().cpu().numpy() if host is None else host
        starts = compute_offsets(lengths)[:-1]
        groups = []
        for index in plan_groups(host, cost, budget):
            own = host[index]
            # longest first: if these are equal, so are all, in their original order
            if len(own) == len(host) and own[0] == own[-1]:
                groups.append(Group.all(len(own), int(own[0]), lengths.device))
                continue
            samples = upload(index, lengths.device)
            count, total, longest = lengths[samples], int(own.sum()), int(own[0])
            first_slots = torch.arange(len(index), device=lengths.device) * longest
            tokens, slots = (
                concat_ranges(first, count, total) for first in (starts[samples], first_slots)
            )
            groups.append(Group(samples, longest, tokens, slots, own))
        return Groups(tuple(groups), lengths, host, int(host.sum()))

    def pad(self, values: Tensor) -> list[Tensor]:
        """[tokens, ...] -> one [n, length, ...] per group. One gather forward, one backward."""
        if not self.groups:
            return []
        order = torch.cat([group.tokens for group in self.groups])
        sizes = [group.tokens.numel() for group in self.groups]
        parts = torch.split(values.index_select(0, order), sizes)
        return [group.pad_own(part) for group, part in zip(self.groups, parts, strict=True)]

    def unpad(self, padded: Sequence[Tensor], like: Tensor) -> Tensor:
        """The inverse of `pad`. Trailing shape, dtype and device are those of `like`."""
        values = like.new_zeros(self.tokens, *like.shape[1:])
        if not self.groups:
            return values
        order = torch.cat([group.tokens for group in self.groups])
        parts = [group.unpad(part) for group, part in zip(self.groups, padded, strict=True)]
        return values.index_copy(0, order, torch.cat(parts))
