"""Deduplication and masks of row requests on a GPU, without a host round trip: the twin of `unique`.

torch sorts and adds up, Triton does what is in between; results of unknown size fill buffers of a known one. `part` alone reads the
device, once for the sizes of all parts of all masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.launch import blocks, on, require_gpu, uploaded
from freescale.kernels.unique import Parted, Unique, check_keys, check_masks

# Entries of a program: 8 a thread with 4 warps. A few loads and stores each; searches are bound by latency, and want many warps.
BLOCK = 1024
SEARCH_BLOCK = 256
EDGES = 128
WARPS = 4
_LIMIT = 2**31 - 1


def deduplicate(keys: Tensor, edges: Tensor) -> Unique:
    """keys [n] int64, none negative; edges [e] int64, rising, the last above every key."""
    check_keys(keys=keys, edges=edges)
    _check_size(keys)
    n = keys.numel()
    if not n:
        none = keys.new_zeros(0)
        return Unique(none, none, none, keys.new_zeros(1), torch.zeros_like(edges))
    from freescale.kernels.triton_unique_kernels import edges_kernel, unique_kernel

    ordered, order, ranks = sorted_ranks(keys)
    unique, inverse, starts = torch.empty_like(ordered), torch.empty_like(ordered), keys.new_empty(n + 1)
    counts = torch.empty(edges.shape, dtype=torch.int64, device=keys.device)
    with on(keys.device):
        unique_kernel[(blocks(n + 1, BLOCK),)](ordered, order, ranks, unique, inverse, starts, n, BLOCK=BLOCK, num_warps=WARPS)
        if edges.numel():
            edges_kernel[(blocks(edges.numel(), EDGES),)](
                ordered, ranks, edges.contiguous(), counts, n, (n + 1).bit_length(), edges.numel(), BLOCK=EDGES, num_warps=WARPS
            )
    return Unique(unique, inverse, order, starts, counts)


def sorted_ranks(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """keys [n] -> (sorted, their places before, equal ones in order of appearance; number of different ones up to each [n])."""
    from freescale.kernels.triton_unique_kernels import flags_kernel

    ordered, order = keys.sort(stable=True)
    flags = torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
    with on(keys.device):
        flags_kernel[(blocks(keys.numel(), BLOCK),)](ordered, flags, keys.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return ordered, order, flags.cumsum(0, dtype=torch.int32)


def members(keys: Tensor, among: Tensor) -> Tensor:
    """keys [n], among [m], int64 -> [n] bool: which of the keys are there."""
    check_keys(keys=keys, among=among)
    _check_size(keys)
    _check_size(among)
    n, m = keys.numel(), among.numel()
    if not n or not m:
        return torch.zeros(n, dtype=torch.bool, device=keys.device)
    from freescale.kernels.triton_unique_kernels import members_kernel

    out = torch.empty(n, dtype=torch.bool, device=keys.device)
    with on(keys.device):
        members_kernel[(blocks(n, SEARCH_BLOCK),)](
            keys.contiguous(), among.sort().values, out.view(torch.int8), n, m, (m + 1).bit_length(),
            BLOCK=SEARCH_BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def collision_masks(current: Tensor, coming: Tensor) -> tuple[Tensor, Tensor]:
    """Rows asked of an owner by batch i [r] and by batch i+1 [s] -> (which of i's batch i+1 asks too, and the other way round)."""
    return members(current, coming), members(coming, current)


def part(masks: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Parted]:
    """masks, each [sum of its sizes] bool: positions that are set and that are not, and how many are set in each part."""
    check_masks(masks, sizes)
    device, lengths = masks[0].device, [mask.numel() for mask in masks]
    n = sum(lengths)
    if n > _LIMIT:
        raise ValueError(f"masks may have up to {_LIMIT} entries together, not {n}")
    require_gpu(device, "kernels.unique")
    if not n:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return [Parted(none, none, [0] * len(parts)) for parts in sizes]
    from freescale.kernels.triton_unique_kernels import part_kernel

    joined = torch.cat(list(masks)).view(torch.int8)
    ranks = torch.zeros(n + 1, dtype=torch.int32, device=device)
    torch.cumsum(joined, 0, dtype=torch.int32, out=ranks[1:])
    # One upload: where the masks begin, then where their parts end.
    ends = list(accumulate(size for parts in sizes for size in parts))
    table = uploaded(np.array([0, *list(accumulate(lengths))[:-1], 0, *ends], np.int64), device)
    counts = ranks[table[len(masks) :]].diff()
    places = torch.empty(n, dtype=torch.int64, device=device)
    with on(device):
        part_kernel[(blocks(n, BLOCK),)](joined, ranks[1:], table, places, n, len(masks), BLOCK=BLOCK, num_warps=WARPS)
    numbers = iter(counts.tolist())  # the one read
    found = [[next(numbers) for _ in parts] for parts in sizes]
    chosen = [sum(parts) for parts in found]
    pieces = places.split([*chosen, *(length - count for length, count in zip(lengths, chosen, strict=True))])
    return [Parted(pieces[k], pieces[len(masks) + k], found[k]) for k in range(len(masks))]


def _check_size(keys: Tensor) -> None:
    if keys.numel() > _LIMIT:
        raise ValueError(f"up to {_LIMIT} keys can be compared, not {keys.numel()}")
    require_gpu(keys.device, "kernels.unique")
