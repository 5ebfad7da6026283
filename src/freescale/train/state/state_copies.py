"""Copies of a run's state in host memory, of one moment, while training goes on.

What is on a GPU is copied twice where the GPU has room: at once within its memory, which takes a
hundredth of the time that the bus needs, and from there by the thread that writes it, piece by
piece, during the steps that follow. No step waits for the bus then, and what lanes send meanwhile
waits for a piece at most. Without room the pieces go over the bus at once, in the caller's stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, _utils

from freescale.streams import new_stream, record_event
from freescale.transport.event_waits import wait_for_event
from freescale.transport.shared_gpu import count_sharing

# Bytes of a piece: an engine of the GPU ends one copy before it begins another, and this one takes
# some 160 us of the bus. Smaller ones take the interpreter from the step more often.
_PIECE = 8 << 20
_SMALL = 16 << 20  # bytes of a tensor that is copied together with others
_TOGETHER = 64 << 20  # bytes of these, at most: torch rounds up what is pinned to powers of two
_flatten: Any = _utils._flatten_dense_tensors  # torch does not annotate these
_unflatten: Any = _utils._unflatten_dense_tensors
# By device: bytes that copies of one moment have taken. torch keeps them for the next.
_taken_before: dict[torch.device, int] = {}


class StateCopies:
    """`take` and `seal` on the threads and streams that have the state; then `finish`, on any."""

    def __init__(self, device: torch.device, room: int | None = None) -> None:
        """`room`: bytes of the device that copies may take; if None, what they once had and what
        `find_room` finds."""
        self._device = device
        # Memory of earlier copies is reused: to ask the driver for more takes long.
        self._room = _taken_before.get(device, 0) if room is None else room
        self._may_ask = room is None and device.type == "cuda"
        self._used = 0  # of the room
        self._kept: list[tuple[Tensor, Tensor]] = []  # (in host memory, what it will hold)
        self._taken: list[torch.cuda.Event] = []

    def take(self, value: Tensor, *, is_copy: bool = False) -> Tensor:
        """A copy in host memory, pinned if `value` is on a GPU: it has the value after `finish`.

        Args:
            value: as the current stream has it now; it may change afterwards.
            is_copy: `value` is one already, and nobody changes it.
        """
        if _is_on_host(value):
            return value if is_copy else value.clone()
        value = value.detach()
        copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        kept = value.contiguous() if is_copy else self._keep(value)
        if kept is None:
            for to, piece in cut_alike(copied, value.contiguous(), _PIECE):
                to.copy_(piece, non_blocking=True)
        else:
            self._kept.append((copied, kept))
        return copied

    def take_all(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `take`, of many: small ones of a GPU that are of one dtype are copied together, since
        each by itself takes some 50 us of the caller, and more of the thread that writes it."""
        taken: dict[str, Tensor] = {}
        for names in _group_alike(values):
            taken |= zip(names, self._take_together([values[name] for name in names]), strict=True)
        return {
            name: taken[name] if name in taken else self.take(value)
            for name, value in values.items()
        }

    def _take_together(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Of contiguous ones that are alike: views of one copy."""
        size = sum(value.nbytes for value in values)
        if len(values) == 1 or not self._has_room(size):
            return [self.take(value) for value in values]
        self._use(size)
        # Made for gradients; a view of each in Python takes the caller longer than all else.
        with torch.no_grad():
            flat = self.take(_flatten(values), is_copy=True)
        return list(_unflatten(flat, values))

    def seal(self) -> None:
        """What was taken since the last call was taken on the current stream."""
        if self._device.type == "cuda":
            self._taken.append(record_event(blocking=True))

    def finish(self) -> None:
        """Waits until the copies have their values, and brings what is on the device."""
        for event in self._taken:
            wait_for_event(event)
        self._taken = []
        if not self._kept:
            return
        stream = new_stream(self._device)
        with torch.cuda.stream(stream):
            while self._kept:
                copied, kept = self._kept.pop(0)
                for to, piece in cut_alike(copied, kept, _PIECE):
                    to.copy_(piece, non_blocking=True)
                    # one piece under way: others' copies find their place between two
                    record_event(blocking=True).synchronize()

    def _keep(self, value: Tensor) -> Tensor | None:
        """A copy on the device, or None for want of room."""
        if not self._has_room(value.nbytes):
            return None
        try:
            kept = value.clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:  # somebody else has the room by now
            self._room, self._may_ask = 0, False
            return None
        self._use(value.nbytes)
        return kept

    def _has_room(self, size: int) -> bool:
        if self._used + size > self._room and self._may_ask:
            self._room, self._may_ask = self._used + find_room(self._device), False
        return self._used + size <= self._room

    def _use(self, size: int) -> None:
        self._used += size
        _taken_before[self._device] = max(self._used, _taken_before.get(self._device, 0))


def _group_alike(values: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of those that can be copied together."""
    groups: list[list[str]] = []
    last: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for name, value in values.items():
        if _is_on_host(value) or not value.is_contiguous() or value.nbytes > _SMALL:
            continue
        kind = value.device, value.dtype
        if kind not in last or sizes[kind] + value.nbytes > _TOGETHER:
            last[kind], sizes[kind] = [], 0
            groups.append(last[kind])
        last[kind].append(name)
        sizes[kind] += value.nbytes
    return groups


def find_room(device: torch.device) -> int:
    """Bytes of a GPU that copies may take for a while, in addition to what they have: half of this
    rank's share of what is free. What torch holds is for the next step."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free // count_sharing() // 2


def _is_on_host(value: Tensor) -> bool:
    return value.is_cpu


def cut_alike(copied: Tensor, value: Tensor, most: int) -> list[tuple[Tensor, Tensor]]:
    """Both, contiguous and alike, in pieces of `most` bytes."""
    size = max(1, most // value.element_size())
    pieces = (torch.split(each.detach().view(-1), size) for each in (copied, value))
    return list(zip(*pieces, strict=True))
