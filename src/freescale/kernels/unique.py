"""Deduplication and masks of row requests, in plain torch.

On a device, results whose size only the device knows come in buffers of the size of the input, so that nothing has to be read to
go on: whoever has to know a size (an AllToAll its splits) reads all of them at once, and cuts the buffers by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Unique:
    """Keys, each once, and where they stood among n."""

    keys: Tensor  # [n] sorted; behind the last one: -1
    inverse: Tensor  # [n]: input i is keys[inverse[i]]
    order: Tensor  # [n] inputs by key, equal ones in order of appearance
    starts: Tensor  # [n + 1]: key j stands at order[starts[j]:starts[j + 1]]; behind the last one: n
    counts: Tensor  # [edges]: keys from the edge before (or the lowest) up to each edge

    def cut(self, count: int) -> Unique:
        """Without what is behind the last key. The count is the sum of the counts, on the host."""
        return replace(self, keys=self.keys[:count], starts=self.starts[: count + 1])


@dataclass(frozen=True)
class Parted:
    """The two halves of a mask."""

    chosen: Tensor  # [sum(counts)] positions where it is set, rising
    rest: Tensor  # [n - sum(counts)] positions where it is not, rising
    counts: list[int]  # of the chosen, in each part


def deduplicate(keys: Tensor, edges: Tensor) -> Unique:
    """keys [n] int64, none negative; edges [e] int64, rising, the last above every key."""
    check_keys(keys=keys, edges=edges)
    n = keys.numel()
    unique, inverse, sizes = torch.unique(keys, return_inverse=True, return_counts=True)
    starts = keys.new_full((n + 1,), n)
    torch.cumsum(sizes, 0, out=starts[1 : unique.numel() + 1])
    starts[0] = 0
    padded = torch.cat([unique, unique.new_full((n - unique.numel(),), -1)])
    counts = torch.searchsorted(unique, edges).diff(prepend=edges.new_zeros(1))
    return Unique(padded, inverse, keys.argsort(stable=True), starts, counts)


def members(keys: Tensor, among: Tensor) -> Tensor:
    """keys [n], among [m], int64 -> [n] bool: which of the keys are there."""
    check_keys(keys=keys, among=among)
    return torch.isin(keys, among)


def collision_masks(current: Tensor, coming: Tensor) -> tuple[Tensor, Tensor]:
    """Rows asked of an owner by batch i [r] and by batch i+1 [s] -> (which of i's batch i+1 asks too, and the other way round)."""
    return members(current, coming), members(coming, current)


def part(masks: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Parted]:
    """masks, each [sum of its sizes] bool: positions that are set and that are not, and how many are set in each part."""
    check_masks(masks, sizes)
    halves = []
    for mask, parts in zip(masks, sizes, strict=True):
        counts = [int(piece.sum()) for piece in mask.split(list(parts))] if parts else []
        halves.append(Parted(mask.nonzero().squeeze(1), (~mask).nonzero().squeeze(1), counts))
    return halves


def check_keys(**keys: Tensor) -> None:
    for name, tensor in keys.items():
        if tensor.dtype != torch.int64 or tensor.ndim != 1:
            raise ValueError(f"{name} must be a 1-d int64 tensor, not {tensor.dtype} with {tensor.ndim} axes")
    if len({tensor.device for tensor in keys.values()}) > 1:
        raise ValueError(f"tensors lie on different devices: { {name: str(t.device) for name, t in keys.items()} }")


def check_masks(masks: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> None:
    if len(masks) != len(sizes) or not masks:
        raise ValueError(f"{len(masks)} masks need as many lists of sizes, and at least one, not {len(sizes)}")
    for number, (mask, parts) in enumerate(zip(masks, sizes, strict=True)):
        if mask.dtype != torch.bool or mask.ndim != 1:
            raise ValueError(f"mask {number} must be a 1-d bool tensor, not {mask.dtype} with {mask.ndim} axes")
        if min(parts, default=0) < 0 or sum(parts) != mask.numel():
            raise ValueError(f"sizes of mask {number} add up to {sum(parts)}, it has {mask.numel()} entries")
    if len({mask.device for mask in masks}) > 1:
        raise ValueError(f"masks lie on different devices: {[str(mask.device) for mask in masks]}")
