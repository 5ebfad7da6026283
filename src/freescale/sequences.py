"""Features of variable length: jagged sequences, and candidates with values of their own.

Moves of samples (select, slice, concat) are index arithmetic, without a Python loop over samples,
on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

_BY_POSITION = "has_row_per_position"  # attribute of marked parameters


def mark_positions(parameter: nn.Parameter) -> None:
    """Marks a parameter whose row i belongs to position i. A batch with sequences of up to n events
    reaches rows 0 to n (what follows the events is at n); other rows have no gradient."""
    setattr(parameter, _BY_POSITION, True)


def has_positions(parameter: nn.Parameter) -> bool:
    return getattr(parameter, _BY_POSITION, False)


def compute_offsets(lengths: Tensor) -> Tensor:
    """[n] lengths -> [n + 1] offsets."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def concat_ranges(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Concatenates ranges [starts[i], starts[i] + lengths[i]) -> [total]; reads the device without
    a `total`."""
    offsets = compute_offsets(lengths)
    total = int(offsets[-1]) if total is None else total
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return torch.arange(total, device=lengths.device) + shift


@dataclass(frozen=True)
class HostSizes:
    """Sizes of device tokens that the host knows, to avoid reads. Tensors are on the CPU."""

    lengths: Tensor  # [samples] int64, candidates included
    candidate_counts: Tensor | None = None  # [samples] int64
    time_span: int | None = None  # longest time span of a sample; None: unknown
    plans: Any = None  # holder of attention plans, for batches of one padded size


@dataclass(frozen=True)
class Jagged:
    """One feature with a variable number of values per sample."""

    values: Tensor  # [tokens, ...]
    lengths: Tensor  # [samples] int64
    # the copy on the CPU that it moved from
    host: Jagged | None = field(default=None, repr=False, compare=False)
    # largest difference of two values of a sample, if known
    span: int | None = field(default=None, repr=False, compare=False)
    # of a padded batch: see HostSizes
    plans: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.ndim != 1:
            raise ValueError(
                f"lengths must be a 1-d int64 tensor, not {self.lengths.dtype} with "
                f"{self.lengths.ndim} axes"
            )

    @cached_property
    def offsets(self) -> Tensor:  # [samples + 1]
        return compute_offsets(self.lengths)

    @cached_property
    def host_lengths(self) -> Tensor:  # [samples], on the CPU
        """Host copy of the lengths; reads the device if there is none."""
        if self.host is not None:
            return self.host.lengths
        return self.lengths if self.lengths.is_cpu else self.lengths.cpu()

    def __len__(self) -> int:
        return self.lengths.numel()

    def check(self, name: str) -> None:
        """Checks lengths against values. Reads the device if the host does not know them."""
        lengths = self.host_lengths.numpy()
        if (least := lengths.min(initial=0)) < 0:
            raise ValueError(f"feature {name!r}: a negative length ({least})")
        if (total := lengths.sum()) != self.values.shape[0]:
            raise ValueError(
                f"feature {name!r}: lengths add up to {total}, but there are "
                f"{self.values.shape[0]} values"
            )

    def select(self, index: Tensor) -> Jagged:
        lengths = self.lengths[index]
        return Jagged(self.values[concat_ranges(self.offsets[:-1][index], lengths)], lengths)

    def slice(self, start: int, stop: int) -> Jagged:
        """Samples [start, stop) as views: no copy of the values."""
        first, last = (int(self.host_lengths[:edge].sum()) for edge in (start, stop))
        host = None if self.host is None else self.host.slice(start, stop)
        return Jagged(self.values[first:last], self.lengths[start:stop], host)

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        return Jagged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def tensors(self) -> list[Tensor]:
        return [self.lengths, self.values]

    def refill(self, tensors: Iterator[Tensor]) -> Jagged:
        """The feature made of the next of `tensors`: the inverse of `tensors`."""
        lengths = next(tensors)
        return Jagged(next(tensors), lengths)

    def copy(self, tensors: Iterator[Tensor], moved: bool) -> Jagged:
        """As `refill`, for copies of the tensors. `moved`: they are on another device, so lengths
        that are on the CPU here are kept as host sizes."""
        lengths, host = next(tensors), self if moved and self.lengths.is_cpu else self.host
        return Jagged(next(tensors), lengths, host, self.span)


@dataclass(frozen=True)
class Nested:
    """Two-level jagged: each sample has candidates, each candidate has values."""

    values: Tensor  # [tokens, ...]
    lengths: Tensor  # [candidates] int64: values per candidate
    counts: Tensor  # [samples] int64: candidates per sample
    # the copy on the CPU that it moved from
    host: Nested | None = field(default=None, repr=False, compare=False)

    @cached_property
    def inner(self) -> Jagged:
        return Jagged(self.values, self.lengths, None if self.host is None else self.host.inner)

    @cached_property
    def outer(self) -> Jagged:
        return Jagged(self.lengths, self.counts, None if self.host is None else self.host.outer)

    def __len__(self) -> int:
        return self.counts.numel()

    def check(self, name: str) -> None:
        self.outer.check(f"{name} (candidates per sample)")
        self.inner.check(f"{name} (values per candidate)")

    def select(self, index: Tensor) -> Nested:
        counts = self.counts[index]
        inner = self.inner.select(concat_ranges(self.outer.offsets[:-1][index], counts))
        return Nested(inner.values, inner.lengths, counts)

    def slice(self, start: int, stop: int) -> Nested:
        first, last = (int(self.outer.host_lengths[:edge].sum()) for edge in (start, stop))
        inner = self.inner.slice(first, last)
        host = None if self.host is None else self.host.slice(start, stop)
        return Nested(inner.values, inner.lengths, self.counts[start:stop], host)

    @staticmethod
    def concat(parts: Sequence[Nested]) -> Nested:
        inner = Jagged.concat([p.inner for p in parts])
        return Nested(inner.values, inner.lengths, torch.cat([p.counts for p in parts]))

    def tensors(self) -> list[Tensor]:
        return [self.counts, self.lengths, self.values]

    def refill(self, tensors: Iterator[Tensor]) -> Nested:
        """As of `Jagged`."""
        counts, lengths = next(tensors), next(tensors)
        return Nested(next(tensors), lengths, counts)

    def copy(self, tensors: Iterator[Tensor], moved: bool) -> Nested:
        """As of `Jagged`."""
        host = self if moved and self.counts.is_cpu else self.host
        counts, lengths = next(tensors), next(tensors)
        return Nested(next(tensors), lengths, counts, host)


# Starts an exchange of rows [n, ...]: forwards, to the ranks of later parts, or (True) of their
# gradients back. Returns what waits for the rows that come.
Exchange = Callable[[Tensor, bool], Callable[[], Tensor]]


@dataclass(frozen=True)
class Parts:
    """Parts of divided histories: the first samples of a rank's batch. Their events see those of
    earlier parts, whose keys and values come from other ranks."""

    starts: Sequence[int]  # [parts] events of the history before each
    events: Sequence[int]  # [parts]
    wholes: Sequence[int]  # [parts] events of the whole history
    # What leaves, in the order of the ranks that it goes to: a part of this rank, and the number
    # (in the global batch) of the first later part there, which orders sums of gradients.
    sent: Sequence[tuple[int, int]]
    send: Sequence[int]  # [world] rows for each rank
    receive: Sequence[int]  # [world] rows from each rank
    # [parts] ranges of the received rows that each sees, in the order of the history
    earlier: Sequence[Sequence[tuple[int, int]]]
    exchange: Exchange | None = field(default=None, compare=False)
