"""Copies from a memory file to the device that computes.

The driver copies memory that is not pinned by one thread of its own, which takes most of a restore.
Here all of torch's threads fill pinned pieces, and the bus has some while they fill the next. The
pieces are few, and the same for all tensors: to pin memory takes longer than to copy it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.streams import record_event
from freescale.train.checkpoint.state_copies import cut_alike

_PIECE = 8 << 20  # bytes
_PIECES = 4


class DeviceCopies:
    """Of one restore, on the current stream."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None] * _PIECES
        self._next = 0

    def copy(self, to: Tensor, source: Tensor) -> None:
        """`to.copy_(source)` for a source on the host; small ones, and those that change their
        dtype, as torch does it. The host is done with the source when this returns, not the bus."""
        alike = to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
        if to.device.type != "cuda" or not alike or source.nbytes <= _PIECE:
            to.copy_(source)
        else:
            self.copy_in_pieces(to, source)

    def copy_in_pieces(self, to: Tensor, source: Tensor) -> None:
        """Of a GPU and of the host, alike and contiguous."""
        on_gpu = to.device.type == "cuda"
        if not self._pieces:
            room = torch.empty(_PIECES * _PIECE, dtype=torch.uint8, pin_memory=on_gpu)
            self._pieces = list(torch.split(room, _PIECE))
        for target, piece in cut_alike(to, source, _PIECE):
            turn, self._next = self._next, (self._next + 1) % _PIECES
            event = self._sent[turn]
            if event is not None:
                event.synchronize()
            filled = self._pieces[turn][: piece.nbytes].view(piece.dtype)
            filled.copy_(piece)
            target.copy_(filled, non_blocking=True)
            self._sent[turn] = record_event() if on_gpu else None
