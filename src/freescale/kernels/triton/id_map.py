"""The map from id to row of a dynamic table, in the memory of a GPU: the twin of
`reference.id_map`.

    find       every id of a batch: its bucket, one sector, and the id of the entry it names
    use        last uses and counts of those that have a row
    missing    the others, each once, by shard and ascending; without a sort of the batch
    place      a program for a shard looks for as many entries as its missing ids want
    swap       ids out of the buckets, entries exchanged, ids into the buckets

    room       of tables that count ids before they admit them: how many could be placed

Nothing is read from the device. What is decided depends neither on the order of programs nor on
the buckets; how ids lie in these does, and nobody sees it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.reference import id_map as reference
from freescale.kernels.reference.id_map import Contents, IdMap, Missing, Uses
from freescale.kernels.triton.launch import (
    count_blocks,
    launch_kernel,
    require_gpu,
    round_up_to_power_of_two,
    use_device,
)

WORDS = 8  # of a bucket: 7 entries and one about them
# A bucket for 4 rows of a shard: 8 bytes a row, and 2 in 100 ids are not in their first bucket.
ROWS_OF_BUCKET = 4
# Entries of a program. Searches read 8 words for each and wait for memory; a program of `choose`
# goes through the entries of a shard, some ten times, and orders few of them.
FIND_BLOCK = 128
BLOCK = 256
SHARD_BLOCK = 1024
ORDER_BLOCK = 32
WARPS = 4
REBUILT = 1 << 22  # entries that are put in at a time
_LIMIT = 2**31 - 1


def allocate(shards: int, rows: int, first_shard: int, device: torch.device) -> IdMap:
    """A map without ids."""
    require_gpu(device, "kernels.reference.id_map")
    plain = reference.allocate(shards, rows, first_shard, device)
    words = torch.zeros(shards, count_buckets(rows), WORDS, dtype=torch.int32, device=device)
    return replace(plain, words=words)


def count_buckets(rows: int) -> int:
    """Of a shard: enough for all of its rows, and 8 bytes for each."""
    return max(1, rows // ROWS_OF_BUCKET)


def find(map: IdMap, keys: Tensor, absent: int = -1) -> Tensor:
    """Entries [n] of keys [n]; `absent` for those that have none."""
    found = torch.empty_like(keys)
    _find(map, keys, found, absent, again=False)
    return found


def find_again(map: IdMap, keys: Tensor, found: Tensor, absent: int = -1) -> None:
    """Writes the entries of those keys [n] that were not `found` [n]: their ids may have got
    one."""
    _find(map, keys, found, absent, again=True)


def _find(map: IdMap, keys: Tensor, found: Tensor, absent: int, again: bool) -> None:
    from freescale.kernels.triton.id_map_kernels import find_kernel

    _launch(
        find_kernel, keys, FIND_BLOCK, map.words, map.ids, keys, found, keys.numel(),
        absent, map.first_shard, *_measure(map), AGAIN=again,
    )  # fmt: skip


def use(map: IdMap, found: Tensor, counted: Tensor | None, batch: int) -> Uses:
    """A batch uses entries [n]; -1 is none, and an entry may occur several times. It counts as one
    use if one of them is `counted` [n] uint8; None: all are."""
    from freescale.kernels.triton.id_map_kernels import (
        count_marked_kernel,
        mark_counted_kernel,
        use_kernel,
    )

    n = found.numel()
    last, count = _allocate_pair(n, torch.int32, found.device)
    uses = Uses(torch.empty_like(found), last, count)
    _launch(
        use_kernel, found, BLOCK, map.last, map.count, found, uses.entries, last, count, n, batch,
        COUNTS=counted is None,
    )  # fmt: skip
    if counted is not None:
        _launch(mark_counted_kernel, found, BLOCK, map.count, found, counted, n)
        _launch(count_marked_kernel, found, BLOCK, map.count, uses.entries, n)
    return uses


def swap_uses(map: IdMap, uses: Uses) -> None:
    """Exchanges last uses and counts with those that are noted."""
    from freescale.kernels.triton.id_map_kernels import swap_uses_kernel

    noted = uses.entries, uses.last, uses.count
    _launch(
        swap_uses_kernel, uses.entries, BLOCK, map.last, map.count, *noted, uses.entries.numel()
    )


def list_missing(map: IdMap, keys: Tensor, found: Tensor, counted: Tensor | None) -> Missing:
    """The ids of keys [n], in any order and as often as they occur, that were not `found` [n]. Of
    ids that are never `counted` none is listed."""
    from freescale.kernels.triton.id_choice_kernels import (
        claim_kernel,
        collect_kernel,
        order_kernel,
    )

    n, device = keys.numel(), keys.device
    if n > _LIMIT // 4:
        raise ValueError(f"up to {_LIMIT // 4} ids can be looked up at a time, not {n}")
    size = round_up_to_power_of_two(max(2, 2 * n))
    claims = torch.full((size,), -1, dtype=torch.int32, device=device)
    numbers = torch.empty(n, dtype=torch.int32, device=device)
    wanted = torch.zeros(map.shards, dtype=torch.int32, device=device)
    _launch(
        claim_kernel, keys, BLOCK, keys, found, counted, claims, wanted, numbers, n, size,
        map.first_shard, COUNTED=counted is not None,
    )  # fmt: skip
    starts = wanted.cumsum(0) - wanted
    missing, ordered = _allocate_pair(n, torch.int64, device)
    _launch(collect_kernel, keys, BLOCK, keys, numbers, starts, missing, n, map.first_shard)
    if n and map.shards:
        with use_device(device):
            launch_kernel(
                order_kernel, (map.shards,), missing, wanted, starts, ordered,
                BLOCK=ORDER_BLOCK, num_warps=1,
            )  # fmt: skip
    return Missing(ordered, wanted, starts)


def count_room(map: IdMap, missing: Missing, *, limit: int, evicts: bool) -> Tensor:
    """[shards] int32: how many of the missing ids of each would be placed."""
    from freescale.kernels.triton.id_choice_kernels import room_kernel

    room = torch.empty_like(missing.wanted)
    if map.shards:
        with use_device(room.device):
            launch_kernel(
                room_kernel, (map.shards,), map.last, missing.wanted, room, map.rows, limit,
                EVICTS=evicts, BLOCK=SHARD_BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return room


def place(
    map: IdMap, missing: Missing, *, batch: int, limit: int, by_count: bool, evicts: bool
) -> tuple[Contents, Tensor]:
    """Where missing ids go, in their order: into the empty entries of their shard, the lowest
    first, then, if it `evicts`, into those whose last use was before `limit`, in the order of
    (last use, id), or of (count, last use, id). Changes nothing.

    Returns:
        what to swap with the map, and the sums over shards [3]: ids that get an entry, those whose
        entry held another id, missing ids.
    """
    from freescale.kernels.triton.id_choice_kernels import assign_kernel, choose_kernel

    n, device = missing.ids.numel(), missing.ids.device
    entries = torch.full((n,), -1, dtype=torch.int64, device=device)
    chosen, new_ids = _allocate_pair(n, torch.int64, device)
    last, count = _allocate_pair(n, torch.int32, device)
    taken, evicted = _allocate_pair(map.shards, torch.int32, device)
    held = map.ids, map.last, map.count
    if not n or not map.shards:
        taken, evicted = torch.zeros_like(missing.wanted), torch.zeros_like(missing.wanted)
    else:
        with use_device(device):
            launch_kernel(
                choose_kernel, (map.shards,), *held, missing.wanted, missing.starts, chosen, taken,
                evicted, map.rows, limit,
                BY_COUNT=by_count, EVICTS=evicts, BLOCK=SHARD_BLOCK, num_warps=WARPS,
            )  # fmt: skip
            targets = taken.cumsum(0) - taken
            launch_kernel(
                assign_kernel, (map.shards,), *held, missing.ids, missing.counts, chosen,
                missing.starts, taken,
                evicted, targets, entries, new_ids, last, count, batch,
                BY_COUNT=by_count, OCCURRED=missing.counts is not None, BLOCK=ORDER_BLOCK,
                num_warps=1,
            )  # fmt: skip
    return Contents(entries, last, count, new_ids), torch.stack(
        [taken, evicted, missing.wanted]
    ).sum(1)


def swap_contents(map: IdMap, contents: Contents) -> None:
    """Exchanges ids, last uses and counts with those that are noted."""
    from freescale.kernels.triton.id_map_kernels import put_in_kernel, take_out_kernel

    entries, n = contents.entries, contents.entries.numel()
    noted = entries, contents.ids, contents.last, contents.count
    _launch(
        take_out_kernel, entries, BLOCK, map.words, map.ids, map.last, map.count, *noted, n,
        *_measure(map),
    )  # fmt: skip
    _launch(
        put_in_kernel, entries, BLOCK, map.words, map.ids, map.last, entries, n, 0, *_measure(map),
        ALL=False,
    )  # fmt: skip


def rebuild(map: IdMap) -> None:
    """After ids and last uses were written."""
    from freescale.kernels.triton.id_map_kernels import put_in_kernel

    map.words.zero_()
    for begin in range(0, map.ids.numel(), REBUILT):
        n = min(REBUILT, map.ids.numel() - begin)
        part = map.ids[begin : begin + n]
        _launch(
            put_in_kernel, part, BLOCK, map.words, map.ids, map.last, None, n, begin,
            *_measure(map), ALL=True,
        )  # fmt: skip


def _allocate_pair(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors [n], each at an address of its own: what begins in the middle of another is
    another version of a kernel."""
    first, second = (torch.empty(n, dtype=dtype, device=device) for _ in range(2))
    return first, second


def _measure(map: IdMap) -> tuple[int, int, int]:
    """(rows of a shard, its buckets, bits of a row's number counted from 1)."""
    return map.rows, map.words.shape[1], map.rows.bit_length()


def _launch(kernel: Any, items: Tensor, block: int, *arguments: Any, **named: Any) -> None:
    """A program for each `block` of the items; of none, nothing."""
    if items.numel():
        grid = (count_blocks(items.numel(), block),)
        with use_device(items.device):
            launch_kernel(kernel, grid, *arguments, BLOCK=block, num_warps=WARPS, **named)
