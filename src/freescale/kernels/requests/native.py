"""The functions of `requests.reference` on a CPU, in C, and what divides requests and sums
duplicates. The reference runs if a C function cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.native import address, load_native, require_native
from freescale.kernels.requests import reference as unique
from freescale.worker_server import count_cores

_PLACES = 1 << 31  # of rows, as int32


def is_there(tensor: Tensor) -> bool:
    """Whether there are C functions for tensors on this tensor's device."""
    return tensor.is_cpu and load_native() is not None


def deduplicate(keys: Tensor, edges: Tensor) -> unique.Unique:
    keys = keys.long().contiguous()
    unique.check_keys(keys=keys, edges=edges)
    counts = _allocate(edges.numel(), np.int64)
    found = _deduplicate(keys, edges, counts)
    return unique.deduplicate(keys, edges) if found is None else unique.Unique(*found, counts)


def _deduplicate(
    keys: Tensor, edges: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """(distinct keys, sorted; the place of each input). None for too many and too large keys."""
    n, ends = keys.numel(), 0 if edges is None else edges.numel()
    scratch, found, inverse = (_allocate(size, np.int64) for size in (2 * n, n, n))
    arrays = map(address, (edges, scratch, found, inverse, counts))
    count = require_native().deduplicate_keys(n, address(keys), ends, *arrays)
    if count < 0:
        return None
    return torch.from_numpy(found.numpy()[:count].copy()), inverse  # a copy: a request keeps it


def _allocate(count: int, dtype: type[np.generic]) -> Tensor:
    """Allocates with numpy, which is faster for small arrays."""
    return torch.from_numpy(np.empty(count, dtype))


def collision_masks(current: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    unique.check_keys(current=current, following=following)
    current, following = current.contiguous(), following.contiguous()
    marks = [_allocate(len(rows), np.bool_) for rows in (current, following)]
    done = require_native().mark_shared_rows(
        *(len(current), address(current), len(following), address(following)),
        *map(address, marks),
    )
    return (marks[0], marks[1]) if done else unique.collision_masks(current, following)


def fits_division(rows: Tensor) -> bool:
    """Whether `divide` works for rows [n]."""
    return is_there(rows) and rows.numel() < _PLACES


def divide(
    marked: Tensor, rows: Tensor, sizes: Sequence[int], pieces: int
) -> tuple[Tensor, Tensor]:
    """Positions [n] int32 and counts [(1 + pieces) * ranks] of one list of `divide_rows`."""
    marked, rows = marked.contiguous(), rows.contiguous()
    bins, positions = (1 + pieces) * len(sizes), _allocate(len(rows), np.int32)
    of_ranks = torch.from_numpy(np.array(sizes, np.int64))
    counts, scratch = _allocate(bins, np.int64), _allocate(bins, np.int64)
    arrays = map(address, (of_ranks, marked, rows))
    results = map(address, (scratch, positions, counts))
    require_native().divide_marked_rows(len(sizes), *arrays, pieces, *results)
    return positions, counts


def group_duplicates(rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """As `rows.reference.group_duplicates`, for float32 gradients. None if C cannot do it."""
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
    """into[places] = rows: distinct places [n] int32; rows [n, width] of the dtype of `into`."""
    rows = rows.contiguous()
    assert into.is_contiguous() and places.is_contiguous() and places.dtype == torch.int32
    assert rows.dtype == into.dtype
    size = rows.shape[1] * rows.element_size()
    require_native().put_rows(len(places), size, *map(address, (places, rows, into)))


_MOST_THREADS = 16


def fits(*tensors: Tensor) -> bool:
    """Whether C can copy rows of these tensors."""
    return load_native() is not None and all(
        tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


def copy_rows(to: Tensor, to_rows: Tensor | None, source: Tensor, rows: Tensor | None) -> None:
    """to[to_rows] = source[rows], [n] int64, those of `to` distinct; None: the first n in order."""
    counts = [each.numel() for each in (to_rows, rows) if each is not None]
    assert to.dtype == source.dtype and to.shape[1:] == source.shape[1:] and len(set(counts)) == 1
    width = torch.Size(to.shape[1:]).numel() * to.element_size()
    to_rows, rows = (None if each is None else each.contiguous() for each in (to_rows, rows))
    arrays = map(address, (to, to_rows, source, rows))
    require_native().copy_rows(counts[0], width, *arrays, min(_MOST_THREADS, count_cores()))
