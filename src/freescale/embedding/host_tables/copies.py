"""Rows on their way between their home in host memory and a cache on the device that computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freescale.kernels.requests import native as row_copies
from freescale.kernels.row_moves import triton as triton_row_copies
from freescale.streams import new_stream, record_event
from freescale.transport.event_waits import wait_for_event

# Pinned, of each of the buffers that are used in turn. To start the threads of a copy takes some
# tenths of a millisecond, in which one of them could copy megabytes: pieces are large.
_BUFFER_BYTES = 64 << 20
_BUFFERS = 4

Pairs = Sequence[tuple[Tensor, Tensor]]  # (home, cache): rows, and each tensor of their state


@dataclass(frozen=True)
class Moved:
    """Rows of the home, and their slots in the cache."""

    rows: Tensor  # [n] on the device of the cache, as the slots
    slots: Tensor  # [n]


def move_nothing(device: torch.device) -> Moved:
    """No rows."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return Moved(none, none)


class Copies(Protocol):
    """Copies some rows of several tensors."""

    def move(self, pairs: Pairs, down: Moved, up: Moved) -> None:
        """home[down.rows] = cache[down.slots], then cache[up.slots] = home[up.rows]. No row is in
        both. Cache and home may be used in the order of the current stream."""

    def wait(self) -> None:
        """From the return on the host may use the home."""


class HostCopies:
    """Of a cache that is host memory, too."""

    def move(self, pairs: Pairs, down: Moved, up: Moved) -> None:
        for home, cache in pairs:
            self.send(home, down.rows, cache, down.slots)
        for home, cache in pairs:
            self.bring(home, up.rows, cache, up.slots)

    def wait(self) -> None:
        """It may at any time."""

    def bring(self, home: Tensor, rows: Tensor, cache: Tensor, slots: Tensor) -> None:
        copy_rows(cache, slots, home, rows)

    def send(self, home: Tensor, rows: Tensor, cache: Tensor, slots: Tensor) -> None:
        copy_rows(home, rows, cache, slots)


def copy_rows(to: Tensor, to_rows: Tensor | None, source: Tensor, rows: Tensor | None) -> None:
    """to[to_rows] = source[rows], on the host; None: the first rows in order."""
    if row_copies.fits(to, source):
        row_copies.copy_rows(to, to_rows, source, rows)
        return
    found = source[: len(to_rows)] if rows is None and to_rows is not None else source[rows]
    if to_rows is None:
        to[: len(found)] = found
    else:
        to.index_copy_(0, to_rows, found)


class _Buffer:
    """Pinned memory, and what is under way through it."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.copied: torch.cuda.Event | None = None  # the copy engine has done with it
        self.stores: tuple[Tensor, Tensor, Tensor] | None = None  # home, rows, what they become

    def view(self, like: Tensor, count: int) -> Tensor:
        """Room for `count` rows like those of a tensor; the buffer is free."""
        shape = (count, *like.shape[1:])
        size = torch.Size(shape).numel() * like.element_size()
        return self.bytes[:size].view(like.dtype).view(shape)

    def finish(self) -> None:
        """Waits until it is free: rows that have come down are stored in their home."""
        if self.copied is not None:
            wait_for_event(self.copied)
            self.copied = None
        if self.stores is not None:
            home, rows, values = self.stores
            copy_rows(home, rows, values, None)
            self.stores = None


class PinnedCopies:
    """Of a cache on a GPU: in pieces through a ring of pinned buffers, of all tensors and both
    ways, so that threads of the host gather or scatter one piece while copy engines move others."""

    def __init__(self, widest_row: int) -> None:
        """`widest_row`: bytes of the largest row. ValueError if memory cannot be pinned."""
        size = max(_BUFFER_BYTES, widest_row)
        try:
            self._buffers = [_Buffer(size) for _ in range(_BUFFERS)]
        except RuntimeError as error:
            raise ValueError(
                f"{_BUFFERS * size >> 20} MiB of pinned host memory cannot be had ({error}): raise "
                "the limit of locked memory (ulimit -l, the container's memory)"
            ) from None
        self._used = 0  # buffers, so far

    def move(self, pairs: Pairs, down: Moved, up: Moved) -> None:
        rows = torch.cat([down.rows, up.rows]).cpu()
        down = Moved(rows[: down.rows.numel()], down.slots)
        up = Moved(rows[down.rows.numel() :], up.slots)
        # Rows on their way down occupy buffers until somebody needs these, or the end: meanwhile
        # the host gathers those that go up.
        for home, cache, rows, slots in self._split(pairs, down):
            self._send(home, rows, cache.index_select(0, slots))
        for home, cache, rows, slots in self._split(pairs, up):
            buffer = self._take_buffer()
            room = buffer.view(home, rows.numel())
            copy_rows(room, None, home, rows)
            found = room.to(cache.device, non_blocking=True)
            buffer.copied = record_event(blocking=True)
            cache.index_copy_(0, slots, found)
        self._store()

    def wait(self) -> None:
        """It may from the return of `move` on."""

    def _send(self, home: Tensor, rows: Tensor, values: Tensor) -> None:
        """Values on their way to a buffer, from which the host will store them."""
        buffer = self._take_buffer()
        room = buffer.view(home, rows.numel())
        room.copy_(values, non_blocking=True)
        buffer.copied = record_event(blocking=True)
        buffer.stores = home, rows, room

    def _store(self) -> None:
        """What is on its way, as it arrives."""
        for buffer in self._buffers:
            if buffer.stores is not None:
                buffer.finish()

    def _take_buffer(self) -> _Buffer:
        """The buffer that was used longest ago, free."""
        buffer = self._buffers[self._used % len(self._buffers)]
        buffer.finish()
        self._used += 1
        return buffer

    def _split(self, pairs: Pairs, moved: Moved) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(home, cache, rows on the host, slots) of one piece after another."""
        for home, cache in pairs:
            for part in self._cut(home, moved.rows.numel()):
                yield home, cache, moved.rows[part], moved.slots[part]

    def _cut(self, home: Tensor, count: int) -> list[slice]:
        """Pieces of `count` rows, as many as a buffer holds each."""
        width = torch.Size(home.shape[1:]).numel() * home.element_size()
        most = max(1, self._buffers[0].bytes.numel() // width)
        return [slice(at, at + most) for at in range(0, count, most)]


class DirectCopies(PinnedCopies):
    """Of a cache on a GPU and a home that is pinned: a kernel reads the rows that come, while those
    that leave travel through buffers, and the host's threads store them. Short rows keep either of
    both busy: of 512 bytes a GPU reads 40 million a second, wherever they go."""

    def __init__(self, widest_row: int, device: torch.device) -> None:
        super().__init__(widest_row)
        self._down = new_stream(device)
        self._moved: torch.cuda.Event | None = None  # the last rows have come

    def move(self, pairs: Pairs, down: Moved, up: Moved) -> None:
        # out of their slots, which the others get; the host needs their numbers
        leaving = [(home, cache.index_select(0, down.slots)) for home, cache in pairs]
        rows = torch.empty(down.rows.shape, dtype=down.rows.dtype, pin_memory=True)
        rows.copy_(down.rows, non_blocking=True)
        ready = record_event()
        for home, cache in pairs:
            triton_row_copies.copy_rows(cache, up.slots, home, up.rows)
        self._moved = record_event(blocking=True)
        with torch.cuda.stream(self._down):  # while the kernel runs; over when `_store` returns
            self._down.wait_event(ready)
            for home, values in leaving:
                for part in self._cut(home, rows.numel()):
                    self._send(home, rows[part], values[part])
        self._store()

    def wait(self) -> None:
        if self._moved is not None:
            wait_for_event(self._moved)
