"""Tensors in one buffer: a batch reaches a device or another process in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels load whole vectors


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a buffer. A tensor that occurs several times (lengths that columns
    share) is stored once and is one tensor again after reading."""

    dtypes: tuple[torch.dtype, ...]  # of distinct tensors
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # in bytes
    order: tuple[int, ...]  # index of each tensor among these
    size: int  # bytes of the buffer

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Layout:
        distinct = list({id(tensor): tensor for tensor in tensors}.values())
        number = {id(tensor): i for i, tensor in enumerate(distinct)}
        offsets, end = [], 0
        for tensor in distinct:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return Layout(
            tuple(tensor.dtype for tensor in distinct),
            tuple(tuple(tensor.shape) for tensor in distinct),
            tuple(offsets),
            tuple(number[id(tensor)] for tensor in tensors),
            end,
        )

    def write(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        """Copies tensors of this layout into a buffer (uint8) on their device."""
        for place, tensor in dict(zip(self.view(buffer), tensors, strict=True)).items():
            if place.is_cpu and tensor.is_cpu:  # torch would wake its threads for it
                np.copyto(view_bytes(place).numpy(), view_bytes(tensor.contiguous()).numpy())
            else:
                place.copy_(tensor)

    def view(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer (uint8, aligned), without a copy."""
        # a view of the whole per dtype, so that each tensor is one operation
        wholes = {dtype: buffer[: self.size].view(dtype) for dtype in dict.fromkeys(self.dtypes)}
        base = buffer.storage_offset()
        distinct = []
        for dtype, shape, offset in zip(self.dtypes, self.shapes, self.offsets, strict=True):
            strides, step = [0] * len(shape), 1
            for axis in range(len(shape) - 1, -1, -1):
                strides[axis], step = step, step * max(shape[axis], 1)
            first = (base + offset) // dtype.itemsize
            distinct.append(wholes[dtype].as_strided(shape, strides, first))
        return [distinct[i] for i in self.order]


def view_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8 of a contiguous tensor, without a copy."""
    assert tensor.is_contiguous()
    # not view(-1): it keeps whatever stride a tensor with one element or none has
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


Bounds = tuple[tuple[int, int] | None, ...]


def find_bounds(tensors: Sequence[Tensor]) -> Bounds:
    """(least, greatest) of each tensor of integers on the host that holds any; None for others."""
    found: list[tuple[int, int] | None] = []
    for tensor in tensors:
        some = tensor.numel() and tensor.dtype in (torch.int64, torch.int32)
        host = tensor.numpy() if some else None  # torch would wake its threads for it
        found.append(None if host is None else (int(host.min()), int(host.max())))
    return tuple(found)


class Lease(Protocol):
    """Memory that its owner reuses when its tensors are gone."""

    def hold(self, copied: torch.cuda.Event) -> None:
        """A device reads the memory until this event."""


@dataclass(frozen=True)
class Packed:
    """A buffer with tensors in it."""

    buffer: Tensor  # [bytes] uint8
    layout: Layout
    lease: Lease | None = field(default=None, compare=False)
    bounds: Bounds | None = None  # of its tensors, if known

    @staticmethod
    def of(tensors: Sequence[Tensor], pin: bool = False) -> Packed:
        """Copies tensors on the host into a new buffer."""
        layout = Layout.of(tensors)
        buffer = torch.empty(layout.size, dtype=torch.uint8, pin_memory=pin)
        layout.write(tensors, buffer)
        return Packed(buffer, layout)

    def tensors(self) -> list[Tensor]:
        return self.layout.view(self.buffer)

    def to(self, device: torch.device, non_blocking: bool = False) -> Packed:
        """One copy, on the current stream."""
        buffer = self.buffer.to(device, non_blocking=non_blocking)
        if self.lease is not None and device.type == "cuda" and non_blocking:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(device))
            self.lease.hold(copied)
        return Packed(buffer, self.layout)
