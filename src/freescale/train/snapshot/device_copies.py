"""Copies from a memory file to the device that computes.

The driver copies memory that is not pinned by one thread of its own, which takes most of a restore.
Here all of torch's threads fill pinned pieces, and the bus has one piece while they fill the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.streams import record_event
from freescale.train.checkpoint.state_copies import cut_alike

_PIECE = 32 << 20  # bytes
_PIECES = 2


def copy_to_device(to: Tensor, source: Tensor) -> None:
    """`to.copy_(source)` for a source on the host, on the current stream; small ones, and those
    that change their dtype, as torch does it."""
    alike = to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
    if to.device.type != "cuda" or not alike or source.nbytes <= _PIECE:
        to.copy_(source)
        return
    copy_in_pieces(to, source)


def copy_in_pieces(to: Tensor, source: Tensor) -> None:
    """Of a GPU and of the host, alike and contiguous. The host is done with the source when this
    returns, not the bus."""
    pinned, size = to.device.type == "cuda", max(1, _PIECE // source.element_size())
    buffers = [torch.empty(size, dtype=to.dtype, pin_memory=pinned) for _ in range(_PIECES)]
    sent: list[torch.cuda.Event | None] = [None] * _PIECES
    for number, (target, piece) in enumerate(cut_alike(to, source, _PIECE)):
        turn = number % _PIECES
        event, room = sent[turn], buffers[turn][: piece.numel()]
        if event is not None:
            event.synchronize()
        room.copy_(piece)
        target.copy_(room, non_blocking=True)
        sent[turn] = record_event() if pinned else None
