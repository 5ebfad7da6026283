"""Deduplication, masks and groups of row requests, in plain torch.

On a device, results of a size that only the device knows fill buffers of the size of the input: a
caller that needs sizes reads all of them at once, and cuts the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.upload import upload


@dataclass(frozen=True)
class Unique:
    """Distinct keys, and the places of n inputs among them."""

    keys: Tensor  # [u to n], sorted; -1 behind the last one
    inverse: Tensor  # [n]: input i is keys[inverse[i]]
    counts: Tensor  # [edges]: keys between the previous edge, if there is one, and each edge


def deduplicate(keys: Tensor, edges: Tensor) -> Unique:
    """keys [n] int64 or int32; edges [e] int64, ascending, the last above every key."""
    check_keys(keys=keys if keys.dtype != torch.int32 else keys.long(), edges=edges)
    unique, inverse = torch.unique(keys, return_inverse=True)
    return Unique(
        unique, inverse, torch.searchsorted(unique, edges).diff(prepend=edges.new_zeros(1))
    )


def collision_masks(current: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Rows requested from an owner by batch i [r] and by batch i+1 [s] -> bool masks [r] and [s] of
    the rows that the other batch requests, too."""
    check_keys(current=current, following=following)
    if not current.is_cuda:
        return _find_on_host(current, following), _find_on_host(following, current)
    joined = torch.cat([current, following])
    order = sort_stably(joined)
    ordered = joined[order]
    # Equal rows are together, those of batch i first: both batches request a row if its group
    # begins with batch i and ends with batch i+1.
    edges = torch.ones(joined.numel() + 1, dtype=torch.bool, device=joined.device)
    torch.ne(ordered[1:], ordered[:-1], out=edges[1:-1])
    now = order < current.numel()
    begins = edges.nonzero().squeeze(1)
    both = now[begins[:-1]] & ~now[begins[1:] - 1]
    marks = torch.empty_like(now)
    marks[order] = both.repeat_interleave(begins.diff(), output_size=joined.numel())
    return marks[: current.numel()], marks[current.numel() :]


def _find_on_host(wanted: Tensor, given: Tensor) -> Tensor:
    """[n] bool: which of the wanted rows [n] are among the given ones [m]. With numpy: for few rows
    torch's call overhead would dominate, for many the memory of its intermediate results."""
    rows, ordered = wanted.numpy(), np.sort(given.numpy())
    if not ordered.size:
        return torch.zeros(rows.shape, dtype=torch.bool)
    places = ordered.searchsorted(rows)
    return torch.from_numpy(ordered.take(places, mode="clip") == rows)


def group_by_tag(tags: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """tags [n] below `bins` -> (positions [n], sorted stably by tag; counts of tags [bins])."""
    if tags.is_cuda:
        ordered, order = tags.to(torch.int32).sort(stable=True)
        return order, torch.searchsorted(
            ordered, torch.arange(bins + 1, dtype=torch.int32, device=tags.device)
        ).diff()
    small = tags.to(torch.uint16) if bins <= 1 << 16 else tags  # numpy sorts 16 bits by counting
    return sort_stably(small), torch.bincount(tags, minlength=bins)


def sort_stably(values: Tensor) -> Tensor:
    """Positions [n] by value, equal ones in order of appearance. On the CPU with numpy, which
    merges sorted runs: the requests of a rank are one."""
    if values.is_cuda:
        return values.sort(stable=True).indices
    return torch.from_numpy(np.argsort(values.numpy(), kind="stable"))


def check_keys(**keys: Tensor) -> None:
    for name, tensor in keys.items():
        if tensor.dtype != torch.int64 or tensor.ndim != 1:
            raise ValueError(
                f"{name} must be a 1-d int64 tensor, not {tensor.dtype} with {tensor.ndim} axes"
            )
    if len({tensor.device for tensor in keys.values()}) > 1:
        raise ValueError(
            "tensors lie on different devices: "
            f"{ {name: str(t.device) for name, t in keys.items()} }"
        )


@dataclass(frozen=True)
class MarkedRows:
    """Requested rows of owners, in order of the ranks at the other end."""

    marked: Tensor  # [n] bool
    rows: Tensor  # [n]
    sizes: Sequence[int]  # rows of each rank
    pieces: int  # a power of two

    @property
    def bins(self) -> int:
        return (1 + self.pieces) * len(self.sizes)


def find_first_tags(lists: Sequence[MarkedRows]) -> list[int]:
    """The first tag of each list, and the end of the last one: a list has a tag for each bin."""
    return [0, *np.cumsum([one.bins for one in lists]).tolist()]


def tag_rows(lists: Sequence[MarkedRows]) -> Tensor:
    """[n] int32: the tags of all lists, one after another, by which marked rows come first, by
    rank, then the others by piece and rank. A row is in the same piece for all ranks."""
    first = find_first_tags(lists)
    begins = [edge + np.arange(len(one.sizes)) for edge, one in zip(first, lists, strict=False)]
    counts = [np.asarray(one.sizes, np.int64) for one in lists]
    table = np.stack([np.concatenate(begins), np.concatenate(counts)])
    tags, times = upload(table, lists[0].rows.device)
    tags = torch.repeat_interleave(tags, times, output_size=int(table[1].sum()))
    pieces = [
        torch.where(one.marked, 0, ((one.rows & (one.pieces - 1)) + 1) * len(one.sizes))
        for one in lists
    ]
    return tags.add_(torch.cat(pieces)).to(torch.int32)
