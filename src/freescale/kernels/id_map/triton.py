"""The map from ids to rows of a dynamic table, in the memory of a GPU. A batch swaps its changes
with the previous contents: the same call undoes them. Lists of a length that only the device knows
have the length of the input; the rest of them is undefined.

    look up    reads for every id of a batch its bucket, one sector, and the entry found there,
               another sector; updates last uses and counts, and lists the ids without a row
    missing    groups these by shard, each once; without sorting the batch
    place      collects them; one program for each shard finds as many entries as they need, and
               another assigns these in order
    swap       takes ids out of the buckets, exchanges entries, puts ids into the buckets

    read       looks up ids and gathers their rows, in one pass
    room       counts the ids that could be placed, for tables that count ids before admission

Sums of draws take two launches at most, where plain torch takes thirty: they run while a step
computes, in a thread whose every launch takes the interpreter's lock from the thread of the step.

Nothing is read from the device. Decisions depend neither on the order of programs nor on the
buckets. The order of ids in the buckets does, but no result shows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.kernels.id_map.buckets import ROWS
from freescale.kernels.id_map.triton_memory import (
    EMPTY,
    IdMap,
    Listed,
    LookedUp,
    Missing,
    Noted,
    Zeros,
    allocate_choices,
    allocate_noted,
    allocate_scratch,
    pad,
)
from freescale.kernels.jit.launch import (
    KernelModule,
    RowLaunch,
    is_recording,
    launch_blocks,
    require_gpu,
    round_up_to_power_of_two,
)

_kernels = KernelModule("freescale.kernels.id_map.triton_kernels")
_choice_kernels = KernelModule("freescale.kernels.id_map.triton_choice_kernels")
_missing_kernels = KernelModule("freescale.kernels.id_map.triton_missing_kernels")
_draws_kernels = KernelModule("freescale.kernels.id_map.triton_draws_kernels")

WORDS = 8  # of a bucket: 7 entries and one word about them
# A bucket for 4 rows of a shard: 8 bytes a row, and 2 % of the ids are not in their first bucket.
ROWS_OF_BUCKET = 4
# Entries of a program. Searches read 8 words for each and wait for memory. A program of `choose`
# walks through the entries of its shard about ten times and orders few of them: up to HELD_ROWS
# entries in registers, 16 a thread; larger shards block by block. Passes that take many registers
# for an entry work on SCAN_BLOCK entries at a time.
FIND_BLOCK, FIND_WARPS = 128, 4
BLOCK = 128
DRAWS_BLOCK = 256
SHARD_BLOCK = 1024
HELD_ROWS = 4096
HELD_ROWS_OF_WARP = 512
SCAN_BLOCK = 512
ORDER_BLOCK = 32
WARPS = 4
# Rows in flight, with their buckets, entries and columns: many, and none waits for another warp.
READ = RowLaunch(1024, 1)
REBUILT = 1 << 22  # entries that `rebuild` puts into buckets at a time
_LIMIT = 2**31 - 1


def allocate(shards: int, rows: int, first_shard: int, device: torch.device, bits: int) -> IdMap:
    """Creates a map without ids."""
    require_gpu(device, "embedding.dynamic.directory")
    entries = torch.zeros(shards * rows, 2, dtype=torch.int64, device=device)
    words = torch.zeros(shards, count_buckets(rows), WORDS, dtype=torch.int32, device=device)
    _, _, last, count = entries.view(torch.int32).unbind(1)
    last.fill_(EMPTY)
    ids, zeros = entries[:, 0], Zeros(device)
    return IdMap(shards, rows, first_shard, bits, ids, last, count, words, zeros)


def count_buckets(rows: int) -> int:
    """The buckets of a shard: 8 bytes for each row, and room for all."""
    return max(1, rows // ROWS_OF_BUCKET)


def find(map: IdMap, keys: Tensor, absent: int = -1) -> Tensor:
    """Finds the entries [n] of keys [n]; `absent` for keys without one."""
    found = torch.empty_like(keys)
    _launch(
        _kernels.find_kernel, keys.numel(), keys.device, FIND_BLOCK, map.words, map.ids, keys,
        found, keys.numel(), absent, *_measure(map), num_warps=FIND_WARPS,
    )  # fmt: skip
    return found


def read_rows(
    map: IdMap, keys: Tensor, weight: Tensor, absent: int, dtype: torch.dtype | None = None
) -> Tensor:
    """keys [n] -> their rows [n, width] in weight [m, width]; without an entry row `absent`."""
    n, width = keys.numel(), weight.shape[1]
    out = torch.empty(n, width, dtype=dtype or weight.dtype, device=weight.device)
    shape = READ.shape(width)
    launch_blocks(
        _kernels.read_kernel, weight.device, n, shape["R"], map.words, map.ids, keys, weight, out,
        n, absent, *_measure(map), **shape,
    )  # fmt: skip
    return out


def look_up(
    map: IdMap, keys: Tensor, counted: Tensor | None, batch: int, absent: int = -1
) -> LookedUp:
    """Finds the entries of a batch's keys [n], and marks them as used; `absent`, which is no
    entry's number, for keys without one. A batch counts as one use of an entry if one of the
    entry's keys is `counted` [n] uint8; None: all are."""
    n, device = keys.numel(), keys.device
    if n > _LIMIT // 4:
        raise ValueError(f"up to {_LIMIT // 4} ids can be looked up at a time, not {n}")
    # The device waits for the host until the first launch.
    found = torch.empty(n, dtype=torch.int64, device=device)
    uses = allocate_noted(n, 2, device)
    # The first kernel clears it, if it is launched.
    scratch = allocate_scratch(n, map.shards, device, zero=not n or is_recording())
    number = map.zeros.take()
    _launch(
        _kernels.look_up_kernel, n, device, FIND_BLOCK, map.words, map.ids, map.last, map.count,
        keys, found, uses.memory, scratch, map.zeros.words, number, pad(map.shards), uses.padded,
        n, absent, batch, *_measure(map), COUNTS=counted is None, num_warps=FIND_WARPS,
    )  # fmt: skip
    if counted is not None:
        sizes = n, device, BLOCK
        _launch(_kernels.mark_counted_kernel, *sizes, map.count, found, counted, n, absent)
        _launch(_kernels.count_marked_kernel, *sizes, map.count, uses.memory, n)
    return LookedUp(found, uses, scratch, number)


def find_again(map: IdMap, keys: Tensor, lookup: LookedUp, absent: int = -1) -> None:
    """Looks up the keys [n] that had no entry again: their ids may have one now."""
    _launch(
        _kernels.find_again_kernel, keys.numel(), keys.device, FIND_BLOCK, map.words, map.ids, keys,
        lookup.found, lookup.scratch, pad(map.shards), lookup.uses.padded, *_measure(map),
        num_warps=FIND_WARPS,
    )  # fmt: skip


def swap_uses(map: IdMap, uses: Noted) -> None:
    """Exchanges the last uses and counts of the map with those in `uses`."""
    _launch(
        _kernels.swap_uses_kernel, uses.n, uses.memory.device, BLOCK, map.last, map.count,
        uses.memory, uses.padded, uses.n,
    )  # fmt: skip


def list_missing(map: IdMap, keys: Tensor, lookup: LookedUp, counted: Tensor | None) -> Listed:
    """Lists counted ids of keys [n] without an entry, neither collected nor ordered yet."""
    n, device = keys.numel(), keys.device
    choices = allocate_choices(n, map.shards, device)
    missing = Listed(n, map.shards, lookup.scratch, choices, keys)
    memory = missing.scratch, missing.choices, *missing.sizes
    _launch(
        _missing_kernels.claim_kernel, n, device, BLOCK, keys, counted, map.zeros.words,
        lookup.number, *memory, map.first_shard, map.bits, COUNTED=counted is not None,
        SHARD_BLOCK=SHARD_BLOCK,
    )  # fmt: skip
    if not n:
        choices.zero_()
    return missing


def order(map: IdMap, missing: Listed) -> Missing:
    """The same ids in order, for readers before `place`."""
    n, memory = missing.n, (missing.scratch, missing.choices, *missing.sizes)
    device = missing.scratch.device
    _launch(
        _missing_kernels.collect_kernel, n, device, BLOCK, missing.keys, *memory, map.first_shard,
        map.bits,
    )  # fmt: skip
    launch_blocks(
        _missing_kernels.order_kernel, device, map.shards if n else 0, 1, *memory,
        BLOCK=ORDER_BLOCK, num_warps=1,
    )  # fmt: skip
    return Missing(missing.ordered, missing.wanted, missing.starts)


def count_room(map: IdMap, missing: Missing, *, limit: int, evicts: bool) -> Tensor:
    """[shards] int32: how many missing ids of each shard `place` would place."""
    room = torch.empty_like(missing.wanted)
    launch_blocks(
        _choice_kernels.room_kernel, room.device, map.shards, 1, map.last, missing.wanted, room,
        map.rows, limit, EVICTS=evicts, BLOCK=SHARD_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return room


def place(
    map: IdMap, missing: Missing | Listed, *, batch: int, limit: int, by_count: bool, evicts: bool,
    host_sums: Tensor | None = None,
) -> tuple[Noted, Tensor, Tensor]:  # fmt: skip
    """Decides where missing ids go, and changes nothing. In their order they get the empty entries
    of their shard, the lowest first. If the shard `evicts`, the next ones get the entries with a
    last use before `limit`, in order of (last use, id), or of (count, last use, id).

    Returns the contents to swap with the map, memory for as many ids, which `swap_contents` may
    use, and sums over shards [3]: ids that get an entry, evicted ids, missing ids. `host_sums`,
    maybe pinned, receives these too.
    """
    if isinstance(missing, Missing):
        missing = _list(map, missing)
    n, device = missing.n, missing.scratch.device
    sums = torch.empty(3, dtype=torch.int64, device=device)
    if not n or not map.shards:
        sums.zero_()
        if host_sums is not None:
            host_sums.copy_(sums, non_blocking=True)
        return allocate_noted(n, 3, device), missing.ids, sums
    memory = missing.scratch, missing.choices
    launch_blocks(
        _choice_kernels.choose_kernel, device, map.shards, 1, map.ids, missing.keys, *memory, sums,
        host_sums, *missing.sizes, map.first_shard, map.bits, map.rows, limit, BY_COUNT=by_count,
        EVICTS=evicts, SCAN=SCAN_BLOCK, SHARD_BLOCK=SHARD_BLOCK, **_divide(map.rows),
    )  # fmt: skip
    placed = allocate_noted(n, 3, device)
    launch_blocks(
        _choice_kernels.assign_kernel, device, map.shards, 1, map.ids, map.last, map.count,
        *memory, missing.counts, placed.memory, *missing.sizes, map.rows, batch,
        ORDERS=not missing.is_ordered, BY_COUNT=by_count, OCCURRED=missing.counts is not None,
        BLOCK=ORDER_BLOCK, num_warps=1,
    )  # fmt: skip
    return placed, missing.ids, sums


def _list(map: IdMap, missing: Missing) -> Listed:
    """Ordered missing ids, with the memory that the kernels need."""
    n, device = missing.ids.numel(), missing.ids.device
    scratch = allocate_scratch(n, map.shards, device, zero=True)
    choices = allocate_choices(n, map.shards, device)
    listed = Listed(n, map.shards, scratch, choices, None, missing.counts, is_ordered=True)
    listed.wanted.copy_(missing.wanted)
    listed.starts.copy_(missing.starts)
    listed.ordered[:n].copy_(missing.ids)
    return listed


def _divide(rows: int) -> dict[str, int | bool]:
    """The launch options for a program that walks through the rows of a shard."""
    if rows > HELD_ROWS:
        return {"HELD": False, "BLOCK": SHARD_BLOCK, "num_warps": WARPS}
    block = max(HELD_ROWS_OF_WARP, round_up_to_power_of_two(rows))
    return {"HELD": True, "BLOCK": block, "num_warps": block // HELD_ROWS_OF_WARP}


def note(entries: Tensor, last: Tensor, count: Tensor, ids: Tensor) -> Noted:
    """The argument of `swap_contents`, from columns [n]."""
    noted = allocate_noted(entries.numel(), 3, entries.device)
    parts = (noted.entries, entries), (noted.last, last), (noted.count, count), (noted.ids, ids)
    for part, values in parts:
        part.copy_(values)
    return noted


def shorten(contents: Noted, n: int) -> Noted:
    """The first n entries."""
    # While launches are recorded, numbers read from the device are arbitrary: n is clamped like a
    # slice.
    return Noted(contents.memory, min(max(n, 0), contents.n))


def swap_contents(
    map: IdMap, contents: Noted, total: Tensor | None = None, came: Tensor | None = None
) -> None:
    """Exchanges ids, last uses and counts of the map with `contents`: all, or only the first
    `total` [1] if that is given. Writes the new ids of the map to `came` [n] if that is given."""
    n, memory, device = contents.n, contents.memory, contents.memory.device
    measures = _measure(map)[2:]
    _launch(
        _kernels.take_out_kernel, n, device, BLOCK, map.words, map.ids, map.last, map.count,
        memory, total, came, contents.padded, n, *measures,
    )  # fmt: skip
    _launch(
        _kernels.put_in_kernel, n, device, BLOCK, map.words, map.ids, map.last, memory, total, n, 0,
        *measures, ALL=False,
    )  # fmt: skip


def rebuild(map: IdMap) -> None:
    """Makes the map consistent after its ids and last uses were overwritten."""
    map.words.zero_()
    for begin in range(0, map.ids.numel(), REBUILT):
        n = min(REBUILT, map.ids.numel() - begin)
        _launch(
            _kernels.put_in_kernel, n, map.ids.device, BLOCK, map.words, map.ids, map.last, None,
            None, n, begin, *_measure(map)[2:], ALL=True,
        )  # fmt: skip


def _measure(map: IdMap) -> tuple[int, int, int, int, int]:
    """(first shard, bits of a hash, rows and buckets of a shard, bits of a row's number)."""
    return map.first_shard, map.bits, map.rows, map.words.shape[1], map.rows.bit_length()


def _launch(
    kernel: Any, n: int, device: torch.device, block: int, *arguments: Any, **named: Any
) -> None:
    """Launches one program for each `block` of n items."""
    named = {"num_warps": WARPS, **named}
    launch_blocks(kernel, device, n, block, *arguments, BLOCK=block, **named)


def add_draws(
    sums: Tensor, keys: Tensor, worth: Tensor, lowest: int, *, take_back: bool = False
) -> None:
    """As the reference. Sums of integers do not depend on the order of the additions."""
    assert worth.dtype == torch.int64 and worth.is_contiguous()
    _launch_on_sums("add_draws_kernel", sums, keys, worth, lowest, SIGN=-1 if take_back else 1)


def estimate_log(sums: Tensor, keys: Tensor, lowest: int) -> Tensor:
    """As the reference, up to the last bit of a logarithm."""
    found = torch.empty(keys.numel(), dtype=torch.float32, device=keys.device)
    _launch_on_sums("estimate_log_kernel", sums, keys, found, lowest)
    return found


def _launch_on_sums(
    kernel: str, sums: Tensor, keys: Tensor, other: Tensor, lowest: int, **options: Any
) -> None:
    require_gpu(sums.device, "kernels.id_map.reference")
    assert sums.is_contiguous() and keys.dtype == torch.int64 and keys.is_contiguous()
    launch_blocks(
        getattr(_draws_kernels, kernel), sums.device, keys.numel(), DRAWS_BLOCK, sums, keys, other,
        keys.numel(), lowest, BUCKETS=sums.shape[1] // ROWS, BLOCK=DRAWS_BLOCK, **options,
    )  # fmt: skip
