"""Rows on their way between their home in host memory and a cache on the device that computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.host_tables.plan import Numbers
from freescale.kernels.upload import upload
from freescale.streams import record_event
from freescale.transport.threads import wait_for_event

_BUFFER_BYTES = 32 << 20  # pinned, of each of the buffers that are used in turn
_BUFFERS = 4


class Copies(Protocol):
    """Copies some rows of one tensor."""

    def bring(self, home: Tensor, rows: Numbers, cache: Tensor, slots: Numbers) -> None:
        """cache[slots] = home[rows], on the current stream."""

    def send(self, home: Tensor, rows: Numbers, cache: Tensor, slots: Numbers) -> None:
        """home[rows] = cache[slots]; done on return."""


class HostCopies:
    """Of a cache that is host memory, too."""

    def bring(self, home: Tensor, rows: Numbers, cache: Tensor, slots: Numbers) -> None:
        found = home.index_select(0, torch.from_numpy(rows))
        cache.index_copy_(0, torch.from_numpy(slots), found)

    def send(self, home: Tensor, rows: Numbers, cache: Tensor, slots: Numbers) -> None:
        found = cache.index_select(0, torch.from_numpy(slots))
        home.index_copy_(0, torch.from_numpy(rows), found)


class _Buffer:
    """Pinned memory, and when the copy engine has done with it."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.copied: torch.cuda.Event | None = None

    def view(self, like: Tensor, count: int) -> Tensor:
        """Room for `count` rows like those of a tensor, once no copy uses it any more."""
        if self.copied is not None:
            wait_for_event(self.copied)
            self.copied = None
        shape = (count, *like.shape[1:])
        size = torch.Size(shape).numel() * like.element_size()
        return self.bytes[:size].view(like.dtype).view(shape)


class PinnedCopies:
    """Of a cache on a GPU: in pieces through pinned buffers, so that threads of the host gather or
    scatter one piece while a copy engine moves another."""

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

    def _split(self, like: Tensor, rows: Numbers, slots: Numbers) -> Iterator[_Piece]:
        row = like[:0].new_empty((1, *like.shape[1:]), device="meta")
        most = max(1, self._buffers[0].bytes.numel() // (row.numel() * row.element_size()))
        for number, at in enumerate(range(0, rows.size, most)):
            part = slice(at, at + most)
            yield _Piece(self._buffers[number % _BUFFERS], rows[part], slots[part])

    def bring(self, home: Tensor, rows: Numbers, cache: Tensor, slots: Numbers) -> None:
        for piece in self._split(home, rows, slots):
            room = piece.buffer.view(home, piece.rows.size)
            torch.index_select(home, 0, torch.from_numpy(piece.rows), out=room)
            found = room.to(cache.device, non_blocking=True)
            piece.buffer.copied = record_event(blocking=True)
            cache.index_copy_(0, upload(piece.slots, cache.device), found)

    def send(self, home: Tensor, rows: Numbers, cache: Tensor, slots: Numbers) -> None:
        under_way: list[tuple[_Piece, Tensor]] = []
        for piece in self._split(home, rows, slots):
            if len(under_way) == _BUFFERS:
                self._store(home, *under_way.pop(0))
            room = piece.buffer.view(home, piece.rows.size)
            found = cache.index_select(0, upload(piece.slots, cache.device))
            room.copy_(found, non_blocking=True)
            piece.buffer.copied = record_event(blocking=True)
            under_way.append((piece, room))
        for piece, room in under_way:
            self._store(home, piece, room)

    def _store(self, home: Tensor, piece: _Piece, room: Tensor) -> None:
        assert piece.buffer.copied is not None
        wait_for_event(piece.buffer.copied)
        piece.buffer.copied = None
        home.index_copy_(0, torch.from_numpy(piece.rows), room)


class _Piece:
    def __init__(self, buffer: _Buffer, rows: Numbers, slots: Numbers) -> None:
        self.buffer = buffer
        self.rows, self.slots = np.ascontiguousarray(rows), np.ascontiguousarray(slots)
