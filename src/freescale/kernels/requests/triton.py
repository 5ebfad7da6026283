"""Requests for rows on an NVIDIA GPU, without a host round trip: the functions of
`requests.reference`. torch sorts and scans, Triton does the rest. Tags of divided rows take one
launch per list, where plain torch takes five."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.jit.launch import KernelModule, launch_blocks, require_gpu
from freescale.kernels.requests.reference import MarkedRows, Unique, check_keys, find_first_tags
from freescale.kernels.upload import upload

# Entries of a program: 8 a thread with 4 warps, each with a few loads and stores. Searches are
# bound by latency and want many warps.
BLOCK = 1024
SEARCH_BLOCK = 256
EDGES = 128
TAG_BLOCK = 512
WARPS = 4
_LIMIT = 2**31 - 1
_kernels = KernelModule("freescale.kernels.requests.triton_kernels")


@dataclass(frozen=True)
class GroupedKeys(Unique):
    """Unique keys, and which inputs have each."""

    order: Tensor  # [n] inputs by key, equal ones in order of appearance
    # [n + 1]: key j has the inputs order[starts[j]:starts[j + 1]]; behind the last one: n
    starts: Tensor


def deduplicate(keys: Tensor, edges: Tensor) -> GroupedKeys:
    """As the reference. A sort of int32 takes half the passes."""
    check_keys(**({"keys": keys} if keys.dtype != torch.int32 else {}), edges=edges)
    _check_size(keys)
    n = keys.numel()
    if not n:
        none = edges.new_zeros(0)
        return GroupedKeys(keys, none, torch.zeros_like(edges), none, edges.new_zeros(1))
    ordered, order, ranks = sort_and_rank(keys)
    unique, inverse = torch.empty_like(ordered), torch.empty_like(order)
    starts = order.new_empty(n + 1)
    counts = torch.empty(edges.shape, dtype=torch.int64, device=keys.device)
    launch_blocks(
        _kernels.unique_kernel, keys.device, n + 1, BLOCK, ordered, order, ranks, unique, inverse,
        starts, n, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    launch_blocks(
        _kernels.edges_kernel, keys.device, edges.numel(), EDGES, ordered, ranks,
        edges.contiguous(), counts, n, (n + 1).bit_length(), edges.numel(), BLOCK=EDGES,
        num_warps=WARPS,
    )  # fmt: skip
    return GroupedKeys(unique, inverse, counts, order, starts)


def sort_and_rank(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """keys [n] -> (sorted keys, their places before, the number of different ones up to each), all
    [n]. Equal keys stay in order of appearance."""
    ordered, order = keys.sort(stable=True)
    flags = torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
    launch_blocks(
        _kernels.flags_kernel, keys.device, keys.numel(), BLOCK, ordered, flags, keys.numel(),
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return ordered, order, flags.cumsum(0, dtype=torch.int32)


def find_members(keys: Tensor, among: Tensor) -> Tensor:
    """keys [n], among [m], int64 -> [n] bool: which of the keys are there."""
    check_keys(keys=keys, among=among)
    _check_size(keys)
    _check_size(among)
    n, m = keys.numel(), among.numel()
    if not n or not m:
        return torch.zeros(n, dtype=torch.bool, device=keys.device)
    out = torch.empty(n, dtype=torch.bool, device=keys.device)
    launch_blocks(
        _kernels.members_kernel, keys.device, n, SEARCH_BLOCK, keys.contiguous(),
        among.sort().values, out.view(torch.int8), n, m, (m + 1).bit_length(),
        BLOCK=SEARCH_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out


def collision_masks(current: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    return find_members(current, following), find_members(following, current)


def _check_size(keys: Tensor) -> None:
    if keys.numel() > _LIMIT:
        raise ValueError(f"up to {_LIMIT} keys can be compared, not {keys.numel()}")
    require_gpu(keys.device, "kernels.requests.reference")


def tag_rows(lists: Sequence[MarkedRows]) -> Tensor:
    device, sizes = lists[0].rows.device, [one.rows.numel() for one in lists]
    require_gpu(device, "kernels.requests.reference")
    for one in lists:
        assert one.rows.dtype == torch.int64 and one.marked.dtype == torch.bool
        assert one.rows.is_contiguous() and one.marked.is_contiguous()
    first = find_first_tags(lists)
    if max(sum(sizes), first[-1]) > _LIMIT:
        raise ValueError(f"up to {_LIMIT} rows and parts of them can be numbered")
    bounds = [np.concatenate([[0], np.cumsum(np.asarray(one.sizes, np.int64))]) for one in lists]
    begins = np.cumsum([0] + [len(each) for each in bounds])
    table = upload(np.concatenate(bounds).astype(np.int32), device)
    tags = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    for number, (one, part) in enumerate(zip(lists, torch.split(tags, sizes), strict=True)):
        ranks = len(one.sizes)
        launch_blocks(
            _kernels.tag_kernel, device, part.numel(), TAG_BLOCK, part,
            one.marked.view(torch.int8), one.rows, table[int(begins[number]) :], part.numel(),
            first[number], ranks, one.pieces, ranks.bit_length(), BLOCK=TAG_BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return tags
