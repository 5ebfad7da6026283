"""The map from id to row of a dynamic table, in the memory of a GPU: the twin of
`reference.id_map`.

    look up    every id of a batch: its bucket, one sector, and the entry it names, another one; in
               the same pass last uses and counts of those that have a row, and a list of the others
    missing    these, each once, by shard; without a sort of the batch
    place      they are collected, and a program for a shard looks for as many entries as they want;
               another one gives them these, in order
    swap       ids out of the buckets, entries exchanged, ids into the buckets

    read       ids are looked up and their rows gathered, in one pass
    room       of tables that count ids before they admit them: how many could be placed

Nothing is read from the device. What is decided depends neither on the order of programs nor on
the buckets; how ids lie in these does, and nobody sees it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.id_map import reference
from freescale.kernels.id_map.reference import IdMap, Missing
from freescale.kernels.id_map.triton_memory import (
    Listed,
    LookedUp,
    Noted,
    Zeros,
    allocate_choices,
    allocate_noted,
    allocate_scratch,
    pad,
)
from freescale.kernels.jit.launch import (
    RowLaunch,
    count_blocks,
    is_recording,
    launch_kernel,
    require_gpu,
    round_up_to_power_of_two,
    use_device,
)

WORDS = 8  # of a bucket: 7 entries and one about them
# A bucket for 4 rows of a shard: 8 bytes a row, and 2 in 100 ids are not in their first bucket.
ROWS_OF_BUCKET = 4
# Entries of a program. Searches read 8 words for each and wait for memory; a program of `choose`
# goes through the entries of a shard, some ten times, and orders few of them: a shard of up to
# HELD_ROWS in registers, 16 entries a thread, one of more block by block. What takes many registers
# for an entry goes through SCAN_BLOCK at a time.
FIND_BLOCK, FIND_WARPS = 128, 4
BLOCK = 128
SHARD_BLOCK = 1024
HELD_ROWS = 4096
HELD_ROWS_OF_WARP = 512
SCAN_BLOCK = 512
ORDER_BLOCK = 32
WARPS = 4
# Rows whose buckets, entries and columns are on their way: many, and none waits for another warp.
READ = RowLaunch(1024, 1)
REBUILT = 1 << 22  # entries that are put in at a time
_LIMIT = 2**31 - 1


def allocate(shards: int, rows: int, first_shard: int, device: torch.device, bits: int) -> IdMap:
    """A map without ids."""
    require_gpu(device, "kernels.id_map.reference")
    plain = reference.allocate(shards, rows, first_shard, device, bits)
    words = torch.zeros(shards, count_buckets(rows), WORDS, dtype=torch.int32, device=device)
    return replace(plain, words=words, zeros=Zeros(device))


def count_buckets(rows: int) -> int:
    """Of a shard: enough for all of its rows, and 8 bytes for each."""
    return max(1, rows // ROWS_OF_BUCKET)


def find(map: IdMap, keys: Tensor, absent: int = -1) -> Tensor:
    """Entries [n] of keys [n]; `absent` for those that have none."""
    from freescale.kernels.id_map.triton_kernels import find_kernel

    found = torch.empty_like(keys)
    _launch(
        find_kernel, keys.numel(), keys.device, FIND_BLOCK, map.words, map.ids, keys, found,
        keys.numel(), absent, *_measure(map), num_warps=FIND_WARPS,
    )  # fmt: skip
    return found


def read_rows(
    map: IdMap, keys: Tensor, weight: Tensor, absent: int, dtype: torch.dtype | None = None
) -> Tensor:
    """keys [n] -> rows [n, width] of their entries in weight [m, width]; row `absent` for those
    that have none."""
    from freescale.kernels.id_map.triton_kernels import read_kernel

    n, width = keys.numel(), weight.shape[1]
    out = torch.empty(n, width, dtype=dtype or weight.dtype, device=weight.device)
    if n:
        shape = READ.shape(width)
        with use_device(weight.device):
            launch_kernel(
                read_kernel, (count_blocks(n, shape["R"]),), map.words, map.ids, keys, weight, out,
                n, absent, *_measure(map), **shape,
            )  # fmt: skip
    return out


def look_up(
    map: IdMap, keys: Tensor, counted: Tensor | None, batch: int, absent: int = -1
) -> LookedUp:
    """Finds the keys [n] of a batch, which uses their entries; `absent`, no entry's number, for
    those that have none. An entry counts as used once if one of its keys is `counted` [n] uint8;
    None: all are."""
    from freescale.kernels.id_map.triton_kernels import (
        count_marked_kernel,
        look_up_kernel,
        mark_counted_kernel,
    )

    n, device = keys.numel(), keys.device
    if n > _LIMIT // 4:
        raise ValueError(f"up to {_LIMIT // 4} ids can be looked up at a time, not {n}")
    # Until the first launch the device waits for the host.
    found = torch.empty(n, dtype=torch.int64, device=device)
    uses = allocate_noted(n, 2, device)
    # The kernel clears it, if it is launched.
    scratch = allocate_scratch(n, map.shards, device, zero=not n or is_recording())
    number = map.zeros.take()
    _launch(
        look_up_kernel, n, device, FIND_BLOCK, map.words, map.ids, map.last, map.count, keys, found,
        uses.memory, scratch, map.zeros.words, number, pad(map.shards), uses.padded, n, absent,
        batch, *_measure(map), COUNTS=counted is None, num_warps=FIND_WARPS,
    )  # fmt: skip
    if counted is not None:
        _launch(mark_counted_kernel, n, device, BLOCK, map.count, found, counted, n, absent)
        _launch(count_marked_kernel, n, device, BLOCK, map.count, uses.memory, n)
    return LookedUp(found, uses, scratch, number)


def find_again(map: IdMap, keys: Tensor, lookup: LookedUp, absent: int = -1) -> None:
    """Writes the entries of those keys [n] that had none: their ids may have got one."""
    from freescale.kernels.id_map.triton_kernels import find_again_kernel

    _launch(
        find_again_kernel, keys.numel(), keys.device, FIND_BLOCK, map.words, map.ids, keys,
        lookup.found, lookup.scratch, pad(map.shards), lookup.uses.padded, *_measure(map),
        num_warps=FIND_WARPS,
    )  # fmt: skip


def swap_uses(map: IdMap, uses: Noted) -> None:
    """Exchanges last uses and counts with those that are noted."""
    from freescale.kernels.id_map.triton_kernels import swap_uses_kernel

    _launch(
        swap_uses_kernel, uses.n, uses.memory.device, BLOCK, map.last, map.count, uses.memory,
        uses.padded, uses.n,
    )  # fmt: skip


def list_missing(map: IdMap, keys: Tensor, lookup: LookedUp, counted: Tensor | None) -> Listed:
    """The ids of those keys [n] that have no entry, neither collected nor ordered yet. Of ids that
    are never `counted` none is listed."""
    from freescale.kernels.id_map.triton_missing_kernels import claim_kernel

    n, device = keys.numel(), keys.device
    choices = allocate_choices(n, map.shards, device)
    missing = Listed(n, map.shards, lookup.scratch, choices, keys)
    memory = missing.scratch, missing.choices, *missing.sizes
    _launch(
        claim_kernel, n, device, BLOCK, keys, counted, map.zeros.words, lookup.number, *memory,
        map.first_shard, map.bits, COUNTED=counted is not None, SHARD_BLOCK=SHARD_BLOCK,
    )  # fmt: skip
    if not n:
        choices.zero_()
    return missing


def order(map: IdMap, missing: Listed) -> Missing:
    """The same ids, ordered: for whoever reads them before `place`."""
    from freescale.kernels.id_map.triton_missing_kernels import collect_kernel, order_kernel

    n, memory = missing.n, (missing.scratch, missing.choices, *missing.sizes)
    device = missing.scratch.device
    _launch(collect_kernel, n, device, BLOCK, missing.keys, *memory, map.first_shard, map.bits)
    if n and map.shards:
        with use_device(device):
            launch_kernel(
                order_kernel, (map.shards,), *memory, BLOCK=ORDER_BLOCK, num_warps=1
            )  # fmt: skip
    return Missing(missing.ordered, missing.wanted, missing.starts)


def count_room(map: IdMap, missing: Missing, *, limit: int, evicts: bool) -> Tensor:
    """[shards] int32: how many of the missing ids of each would be placed."""
    from freescale.kernels.id_map.triton_choice_kernels import room_kernel

    room = torch.empty_like(missing.wanted)
    if map.shards:
        with use_device(room.device):
            launch_kernel(
                room_kernel, (map.shards,), map.last, missing.wanted, room, map.rows, limit,
                EVICTS=evicts, BLOCK=SHARD_BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return room


def place(
    map: IdMap,
    missing: Missing | Listed,
    *,
    batch: int,
    limit: int,
    by_count: bool,
    evicts: bool,
    told: Tensor | None = None,
) -> tuple[Noted, Tensor, Tensor]:
    """Where missing ids go, in their order: into the empty entries of their shard, the lowest
    first, then, if it `evicts`, into those whose last use was before `limit`, in the order of
    (last use, id), or of (count, last use, id). Changes nothing. Writes the
    sums to `told` [3], too, which may be pinned memory of the host.

    Returns:
        what to swap with the map, room for its ids once more, which is for `swap_contents`, and the
        sums over shards [3]: ids that get an entry, those whose entry held another id, missing ids.
    """
    from freescale.kernels.id_map.triton_choice_kernels import assign_kernel, choose_kernel

    if isinstance(missing, Missing):
        missing = _list(map, missing)
    n, device = missing.n, missing.scratch.device
    sums = torch.empty(3, dtype=torch.int64, device=device)
    if not n or not map.shards:
        sums.zero_()
        if told is not None:
            told.copy_(sums, non_blocking=True)
        return allocate_noted(n, 3, device), missing.ids, sums
    memory = missing.scratch, missing.choices
    with use_device(device):
        launch_kernel(
            choose_kernel, (map.shards,), map.ids, missing.keys, *memory, sums, told,
            *missing.sizes, map.first_shard, map.bits, map.rows, limit, BY_COUNT=by_count,
            EVICTS=evicts, SCAN=SCAN_BLOCK, SHARD_BLOCK=SHARD_BLOCK, **_divide(map.rows),
        )  # fmt: skip
        placed = allocate_noted(n, 3, device)
        launch_kernel(
            assign_kernel, (map.shards,), map.ids, map.last, map.count, *memory, missing.counts,
            placed.memory, *missing.sizes, map.rows, batch, ORDERS=not missing.is_ordered,
            BY_COUNT=by_count, OCCURRED=missing.counts is not None, BLOCK=ORDER_BLOCK, num_warps=1,
        )  # fmt: skip
    return placed, missing.ids, sums


def _list(map: IdMap, missing: Missing) -> Listed:
    """With the memory that kernels need. `missing`: ordered."""
    n, device = missing.ids.numel(), missing.ids.device
    scratch = allocate_scratch(n, map.shards, device, zero=True)
    choices = allocate_choices(n, map.shards, device)
    listed = Listed(n, map.shards, scratch, choices, None, missing.counts, is_ordered=True)
    listed.wanted.copy_(missing.wanted)
    listed.starts.copy_(missing.starts)
    listed.ordered[:n].copy_(missing.ids)
    return listed


def _divide(rows: int) -> dict[str, int | bool]:
    """How a program goes through the rows of a shard."""
    if rows > HELD_ROWS:
        return {"HELD": False, "BLOCK": SHARD_BLOCK, "num_warps": WARPS}
    block = max(HELD_ROWS_OF_WARP, round_up_to_power_of_two(rows))
    return {"HELD": True, "BLOCK": block, "num_warps": block // HELD_ROWS_OF_WARP}


def note(entries: Tensor, last: Tensor, count: Tensor, ids: Tensor) -> Noted:
    """For `swap_contents`: all [n]."""
    noted = allocate_noted(entries.numel(), 3, entries.device)
    parts = (noted.entries, entries), (noted.last, last), (noted.count, count), (noted.ids, ids)
    for part, values in parts:
        part.copy_(values)
    return noted


def shorten(contents: Noted, n: int) -> Noted:
    """The first n of them."""
    # While launches are recorded, numbers of the device are any: as of a slice, they do not matter.
    return Noted(contents.memory, min(max(n, 0), contents.n))


def swap_contents(
    map: IdMap, contents: Noted, total: Tensor | None = None, came: Tensor | None = None
) -> None:
    """Exchanges ids, last uses and counts with those that are noted; the first `total` [1] of
    them, if it is given. Writes the ids that come to `came` [n], if that is."""
    from freescale.kernels.id_map.triton_kernels import put_in_kernel, take_out_kernel

    n, memory, device = contents.n, contents.memory, contents.memory.device
    measures = _measure(map)[2:]
    _launch(
        take_out_kernel, n, device, BLOCK, map.words, map.ids, map.last, map.count, memory, total,
        came, contents.padded, n, *measures,
    )  # fmt: skip
    _launch(
        put_in_kernel, n, device, BLOCK, map.words, map.ids, map.last, memory, total, n, 0,
        *measures, ALL=False,
    )  # fmt: skip


def rebuild(map: IdMap) -> None:
    """After ids and last uses were written."""
    from freescale.kernels.id_map.triton_kernels import put_in_kernel

    map.words.zero_()
    for begin in range(0, map.ids.numel(), REBUILT):
        n = min(REBUILT, map.ids.numel() - begin)
        _launch(
            put_in_kernel, n, map.ids.device, BLOCK, map.words, map.ids, map.last, None, None, n,
            begin, *_measure(map)[2:], ALL=True,
        )  # fmt: skip


def _measure(map: IdMap) -> tuple[int, int, int, int, int]:
    """(its first shard, bits of a hash below the shard, rows of a shard, its buckets, bits of a
    row's number counted from 1)."""
    return map.first_shard, map.bits, map.rows, map.words.shape[1], map.rows.bit_length()


def _launch(
    kernel: Any, n: int, device: torch.device, block: int, *arguments: Any, **named: Any
) -> None:
    """A program for each `block` of n items; of none, nothing."""
    if n:
        with use_device(device):
            launch_kernel(
                kernel, (count_blocks(n, block),), *arguments, BLOCK=block,
                **{"num_warps": WARPS, **named},
            )  # fmt: skip
