"""Rows of requests on a CPU, in C: keys without duplicates, rows that two batches share, requests
in parts, sums of duplicates. Where a function cannot do it, the plain version runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.native import address, load_native, require_native
from freescale.kernels.requests import reference as unique

_PLACES = 1 << 31  # of rows, as int32


def is_there(tensor: Tensor) -> bool:
    """Whether there are functions for tensors where this one is."""
    return tensor.is_cpu and load_native() is not None


def deduplicate(keys: Tensor, edges: Tensor) -> unique.Unique:
    """As the reference."""
    keys = keys.long().contiguous()
    unique.check_keys(keys=keys, edges=edges)
    counts = _allocate(edges.numel(), np.int64)
    found = _deduplicate(keys, edges, counts)
    return unique.deduplicate(keys, edges) if found is None else unique.Unique(*found, counts)


def _deduplicate(
    keys: Tensor, edges: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """The keys, sorted and each once, and where each of those that were given is among them. None
    if they are too many and too large."""
    n, ends = keys.numel(), 0 if edges is None else edges.numel()
    scratch, found, inverse = (_allocate(size, np.int64) for size in (2 * n, n, n))
    arrays = map(address, (edges, scratch, found, inverse, counts))
    count = require_native().deduplicate_keys(n, address(keys), ends, *arrays)
    if count < 0:
        return None
    return torch.from_numpy(found.numpy()[:count].copy()), inverse  # a request keeps them


def _allocate(count: int, dtype: type[np.generic]) -> Tensor:
    """By numpy, which is faster where there is little."""
    return torch.from_numpy(np.empty(count, dtype))


def collision_masks(current: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference."""
    unique.check_keys(current=current, following=following)
    current, following = current.contiguous(), following.contiguous()
    marks = [_allocate(len(rows), np.bool_) for rows in (current, following)]
    done = require_native().mark_shared_rows(
        *(len(current), address(current), len(following), address(following)),
        *map(address, marks),
    )
    return (marks[0], marks[1]) if done else unique.collision_masks(current, following)


def fits_division(rows: Tensor) -> bool:
    """Whether `divide` can divide rows [n]."""
    return is_there(rows) and rows.numel() < _PLACES


def divide(
    marked: Tensor, rows: Tensor, sizes: Sequence[int], pieces: int
) -> tuple[Tensor, Tensor]:
    """Positions [n] int32 and counts [(1 + pieces) * ranks] of one list of `divide_rows`."""
    marked, rows = marked.contiguous(), rows.contiguous()
    bins = (1 + pieces) * len(sizes)
    of_ranks, positions = (
        torch.from_numpy(np.array(sizes, np.int64)),
        _allocate(len(rows), np.int32),
    )
    counts, scratch = _allocate(bins, np.int64), _allocate(bins, np.int64)
    arrays = map(address, (of_ranks, marked, rows))
    results = map(address, (scratch, positions, counts))
    require_native().divide_marked_rows(len(sizes), *arrays, pieces, *results)
    return positions, counts


def group_duplicates(rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """As the reference, of float32 gradients. None where the reference has to do it."""
    found = _deduplicate(rows.contiguous())
    if found is None:
        return None
    numbers, inverse = found

    def sum_gradients(gradients: Tensor) -> tuple[Tensor, Tensor]:
        gradients = gradients.contiguous()
        sums = gradients.new_empty(len(numbers), gradients.shape[1])
        require_native().sum_by_place(
            *gradients.shape, address(inverse), address(gradients), len(numbers), address(sums)
        )
        return numbers, sums

    return sum_gradients


def put_rows(into: Tensor, places: Tensor, rows: Tensor) -> None:
    """into[places] = rows: places [n] int32, different ones; rows [n, width] of the dtype of
    `into`."""
    rows = rows.contiguous()
    assert into.is_contiguous() and places.is_contiguous() and places.dtype == torch.int32
    assert rows.dtype == into.dtype
    size = rows.shape[1] * rows.element_size()
    require_native().put_rows(len(places), size, *map(address, (places, rows, into)))
