"""The Triton kernels of `id_map` that decide: which ids of a batch want an entry, and which entry
each of them gets.

A shard decides for itself, so that a program for each needs no other: it looks for the bounds in
(count, last use, id) up to which entries go, each step a walk through the shard. Every other step
is where the bound would be if entries lay evenly, the ones between halve what is left: few steps
for ids as they come, and never more than twice those of a bisection. The search ends as soon as a
bound has the right number of entries below it. A shard of few rows is read once and walked through
in registers: HELD says so, and then `held` is (last uses, counts, ids) of all its entries.

Sums over all shards are those of the last program that is through: no kernel is launched for them.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.triton.id_map_kernels import (
    BOTTOM,
    ID,
    MOST,
    SIGN,
    TOP,
    USE,
    find_shard,
    load_hashes,
    split_noted,
    split_scratch,
    unmix,
)

# Words at the head of the scratch memory: how many programs of two kernels are through.
CLAIMED = tl.constexpr(4)
CHOSEN = tl.constexpr(8)


@triton.jit
def _split_choices(choices, shards, padded):
    """(where shards begin among missing ids, and among those that get an entry; how many they get,
    and of them by eviction; missing ids in order; the number of each among those of its shard, and
    chosen entries): see id_map.py."""
    taken = (choices + 2 * shards).to(tl.pointer_type(tl.int32), bitcast=True)
    ordered = choices + 3 * shards
    numbers = (ordered + padded).to(tl.pointer_type(tl.int32), bitcast=True)
    return choices, choices + shards, taken, taken + shards, ordered, numbers, numbers + padded


# ---- ids without an entry, by shard


@triton.jit
def _is_last(through, programs):
    """Whether this program is the last of so many to come here, counted by `through` [1] from 0
    on. It sees what all of them have written before."""
    # All threads of a program have written when one of them counts it, and all threads of the last
    # one read when that one has counted all: a barrier is between them, and each count acquires
    # what those before it have released.
    tl.debug_barrier()
    before = tl.atomic_add(through, 1, sem="acq_rel")
    tl.debug_barrier()
    return before == programs - 1


@triton.jit
def _scan(counts, starts, shards, BLOCK: tl.constexpr):
    """starts[shard]: the sum of the counts before it. Returns the sum of all. Counts are of other
    programs, hence past the first cache."""
    before = tl.full((), 0, tl.int64)
    for begin in range(0, shards, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        each = tl.load(counts + at, mask=at < shards, other=0, cache_modifier=".cg")
        tl.store(starts + at, before + tl.cumsum(each, 0) - each, mask=at < shards)
        before += tl.sum(each, 0).to(tl.int64)
    return before


@triton.jit
def _sum(counts, shards, BLOCK: tl.constexpr):
    """As `_scan`, without what is before each."""
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, shards, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(counts + at, mask=at < shards, other=0, cache_modifier=".cg").to(tl.int64)
    return tl.sum(total, 0)


@triton.jit(
    do_not_specialize=["shards", "padded", "first_shard"],
    do_not_specialize_on_alignment=["keys", "counted"],
)
def claim_kernel(
    keys, counted, scratch, choices, shards, padded, first_shard,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr, SHARD_BLOCK: tl.constexpr,
):  # fmt: skip
    """numbers[j]: the number of the key at places[j] among the missing ones of its shard, in any
    order; -1 for those that do not count, and all but one of equal ones. Claims are 0 before,
    afterwards an open-addressing table of the ones that count, each with its place counted from 1.
    What shards want is 0 before; the last program scans it."""
    wanted, claims, _, places = split_scratch(scratch, shards, padded)
    starts, _, _, _, _, numbers, _ = _split_choices(choices, shards, padded)
    size = 2 * padded
    program = tl.program_id(0)
    j = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(scratch)
    there = j < total
    i = tl.load(places + j, mask=there, other=0)
    active = there
    if COUNTED:
        active = active & (tl.load(counted + i, mask=there, other=0) != 0)
    hash = load_hashes(keys, i, there)
    key = (hash ^ SIGN).to(tl.int64, bitcast=True)
    place = (((hash >> 8) & 0xFFFFFFFF).to(tl.int64) * size) >> 32
    first = active & (j < 0)
    while tl.max(active.to(tl.int32), 0) > 0:
        # A comparison has no mask: where there is nothing to do, it is with what never stands
        # there. So only missing keys may come here: the others would all wait for one place.
        expected = tl.where(active, 0, -1)
        held = tl.atomic_cas(claims + place, expected, i + 1, sem="relaxed")
        mine = active & (held == 0)
        first = first | mine
        other = tl.load(keys + held - 1, mask=active & (held > 0), other=0)
        active = active & (held > 0) & (other != key)
        place = tl.where(active, tl.where(place + 1 < size, place + 1, 0), place)
    one = tl.zeros([BLOCK], tl.int32) + 1
    shard = find_shard(hash) - first_shard
    rank = tl.atomic_add(wanted + shard, one, mask=first, sem="relaxed")
    tl.store(numbers + j, tl.where(first, rank, -1), mask=there)
    programs = tl.maximum(1, tl.cdiv(total, BLOCK))  # that have something to do
    if program < programs:  # noqa: SIM102 - with `and`, all programs would count
        if _is_last(scratch + CLAIMED, programs):
            _scan(wanted, starts, shards, SHARD_BLOCK)


@triton.jit(
    do_not_specialize=["shards", "padded", "first_shard"], do_not_specialize_on_alignment=["keys"]
)
def collect_kernel(
    keys, scratch, choices, shards, padded, first_shard, BLOCK: tl.constexpr
):  # fmt: skip
    """Puts missing ids in the range of their shard, where claims were."""
    _, _, missing, places = split_scratch(scratch, shards, padded)
    starts, _, _, _, _, numbers, _ = _split_choices(choices, shards, padded)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(numbers + j, mask=j < tl.load(scratch), other=-1)
    there = rank >= 0
    i = tl.load(places + j, mask=there, other=0)
    hash = load_hashes(keys, i, there)
    start = tl.load(starts + find_shard(hash) - first_shard, mask=there, other=0)
    tl.store(missing + start + rank, unmix(hash).to(tl.int64, bitcast=True), mask=there)


@triton.jit
def _order(missing, want, start, ordered, BLOCK: tl.constexpr):
    """The missing ids of a shard, ascending."""
    for begin in range(0, want, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mine = tl.load(missing + start + at, mask=at < want, other=0)
        rank = tl.zeros([BLOCK], tl.int32)
        for other in range(0, want, BLOCK):
            near = other + tl.arange(0, BLOCK)
            theirs = tl.load(missing + start + near, mask=near < want, other=TOP)
            rank += tl.sum((theirs[None, :] < mine[:, None]).to(tl.int32), 1)
        tl.store(ordered + start + rank, mine, mask=at < want)


@triton.jit(do_not_specialize=["shards", "padded"])
def order_kernel(scratch, choices, shards, padded, BLOCK: tl.constexpr):
    """Ascending in each shard: a program for one."""
    wanted, _, missing, _ = split_scratch(scratch, shards, padded)
    starts, _, _, _, ordered, _, _ = _split_choices(choices, shards, padded)
    shard = tl.program_id(0)
    _order(missing, tl.load(wanted + shard), tl.load(starts + shard), ordered, BLOCK)


# ---- which entries they get


@triton.jit
def _load_entries(
    ids, last, count, first, begin, rows, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """(last uses, counts, ids) of entries of a shard, from `begin` on; behind it, none may go.
    Without BY_COUNT the last uses stand for the counts, which nobody reads."""
    at = begin + tl.arange(0, BLOCK)
    used = tl.load(last + (first + at) * USE, mask=at < rows, other=MOST)
    uses = used
    if BY_COUNT:
        uses = tl.load(count + (first + at) * USE, mask=at < rows, other=0)
    id = tl.load(ids + (first + at) * ID, mask=at < rows, other=0)
    return used, uses, id


@triton.jit
def _is_up_to(
    entries, limit, most_uses, latest, bound, LEVEL: tl.constexpr, BY_COUNT: tl.constexpr
):  # fmt: skip
    """Which entries may go and are, at a level of the order (0: count, 1: last use, 2: id), not
    above `bound`; at the levels before, equal to `most_uses` and `latest`."""
    used, uses, id = entries
    able = (used >= 0) & (used < limit)
    if BY_COUNT:
        able = able & ((uses <= bound) if LEVEL == 0 else (uses == most_uses))
    if LEVEL == 1:
        able = able & (used <= bound)
    if LEVEL == 2:
        able = able & (used == latest) & (id <= bound)
    return able


@triton.jit
def _count_up_to(
    ids, last, count, held, first, rows, limit, most_uses, latest, bound,
    LEVEL: tl.constexpr, HELD: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many entries of a shard `_is_up_to` finds."""
    total = tl.zeros([BLOCK], tl.int32)
    if HELD:
        total += _is_up_to(held, limit, most_uses, latest, bound, LEVEL, BY_COUNT).to(tl.int32)
    else:
        for begin in range(0, rows, BLOCK):
            part = _load_entries(ids, last, count, first, begin, rows, BY_COUNT, BLOCK)
            able = _is_up_to(part, limit, most_uses, latest, bound, LEVEL, BY_COUNT)
            total += able.to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _guess(low, high, need, below, above, LEVEL: tl.constexpr):
    """Where `need` entries would be not above, if from `below` at `low` to `above` at `high` their
    number grew evenly; below `high`."""
    share = (need - below + 0.5) / (above - below + 1.0).to(tl.float64)  # well below 1
    if LEVEL == 2:  # ids: their distance may be more than 63 bits
        width = (high - low).to(tl.uint64, bitcast=True)
        step = (width.to(tl.float64) * share).to(tl.uint64).to(tl.int64, bitcast=True)
    else:
        step = ((high - low).to(tl.float64) * share).to(tl.int32)
    return tl.minimum(low + step, high - 1)


@triton.jit
def _search(
    ids, last, count, held, first, rows, limit, most_uses, latest, low, high, need, above,
    LEVEL: tl.constexpr, HELD: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(A bound in [low, high] that `need` entries are not above or, if none is found, the least one
    that more are not above; how many of those that are equal to it are needed, 0 for all; how many
    these are, if not all are needed). None is below `low`, and `above`, which are more than `need`,
    are not above `high`."""
    below = need * 0
    turn = need * 0
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without a sum
        middle = tl.where(turn == 0, _guess(low, high, need, below, above, LEVEL), middle)
        turn = 1 - turn
        there = _count_up_to(
            ids, last, count, held, first, rows, limit, most_uses, latest, middle,
            LEVEL, HELD, BY_COUNT, BLOCK,
        )  # fmt: skip
        below = tl.where(there <= need, there, below)
        above = tl.where(there < need, above, there)
        low = tl.where(there < need, middle + 1, tl.where(there == need, middle, low))
        high = tl.where(there < need, high, middle)
    return low, need - below, above - below


@triton.jit
def _find_tied_ids(
    ids, last, count, held, first, rows, most_uses, latest,
    HELD: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(least, greatest) id of the entries that are equal but for it."""
    least = tl.zeros([BLOCK], tl.int64) + TOP
    greatest = tl.zeros([BLOCK], tl.int64) + BOTTOM
    for begin in range(0, rows, BLOCK):
        used, uses, id = (
            held if HELD else _load_entries(ids, last, count, first, begin, rows, BY_COUNT, BLOCK)
        )
        tied = used == latest
        if BY_COUNT:
            tied = tied & (uses == most_uses)
        least = tl.minimum(least, tl.where(tied, id, TOP))
        greatest = tl.maximum(greatest, tl.where(tied, id, BOTTOM))
    return tl.min(least, 0), tl.max(greatest, 0)


@triton.jit(do_not_specialize=["rows", "limit"])
def room_kernel(
    last, wanted, room, rows, limit, EVICTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """room[shard]: how many of the missing ids `choose_kernel` has entries for."""
    shard = tl.program_id(0).to(tl.int64)
    want = tl.load(wanted + shard)
    total = tl.zeros([BLOCK], tl.int32)
    if want > 0:
        for begin in range(0, rows, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            used = tl.load(last + (shard * rows + at) * USE, mask=at < rows, other=MOST)
            able = used < 0
            if EVICTS:
                able = able | (used < limit)
            total += able.to(tl.int32)
    tl.store(room + shard, tl.minimum(want, tl.sum(total, 0)))


@triton.jit(do_not_specialize=["shards", "padded", "rows", "limit"])
def choose_kernel(
    ids, last, count, scratch, choices, sums, shards, padded, rows, limit,
    BY_COUNT: tl.constexpr, EVICTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for a shard: as many entries as its missing ids want, if there are so many. The
    lowest empty ones, ascending, and behind them the first ones in the order of eviction, also
    ascending by their number: `assign_kernel` puts them in that order. Chosen are their numbers in
    the shard. The last program scans how many each shard has taken, and sums up what shards have
    taken, evicted and wanted: sums [3]."""
    # Triton's loops know no name of two types: `_` is another one below.
    wanted, claims, missing, places = split_scratch(scratch, shards, padded)
    starts, targets, taken, evicted, ordered, numbers, chosen = _split_choices(
        choices, shards, padded
    )
    shard = tl.program_id(0).to(tl.int64)
    want = tl.load(wanted + shard)
    start = tl.load(starts + shard)
    first = shard * rows
    empties = want * 0
    need = want * 0
    if want > 0:
        held = _load_entries(ids, last, count, first, 0, rows, BY_COUNT, BLOCK)
        empty = tl.zeros([BLOCK], tl.int32)
        able = tl.zeros([BLOCK], tl.int32)
        oldest = tl.zeros([BLOCK], tl.int32) + MOST
        fewest = tl.zeros([BLOCK], tl.int32) + MOST
        highest = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, rows, BLOCK):
            used, uses, _ = (
                held
                if HELD
                else _load_entries(ids, last, count, first, begin, rows, BY_COUNT, BLOCK)
            )
            empty += (used < 0).to(tl.int32)
            if EVICTS:
                old = (used >= 0) & (used < limit)
                able += old.to(tl.int32)
                oldest = tl.minimum(oldest, tl.where(old, used, MOST))
                if BY_COUNT:
                    fewest = tl.minimum(fewest, tl.where(old, uses, MOST))
                    highest = tl.maximum(highest, tl.where(old, uses, 0))
        empties = tl.minimum(tl.sum(empty, 0), want)
        ables = tl.sum(able, 0)
        need = tl.minimum(ables, want - empties)
        # (count, last use, id) up to which entries go: as yet, all
        most_uses = want * 0 + MOST
        latest = want * 0 + limit
        greatest = first * 0 + TOP
        if (need > 0) & (need < ables):
            left = need
            tied = ables
            if BY_COUNT:
                most_uses, left, tied = _search(
                    ids, last, count, held, first, rows, limit, most_uses, latest,
                    tl.min(fewest, 0), tl.max(highest, 0), left, tied,
                    0, HELD, BY_COUNT, BLOCK,
                )  # fmt: skip
            if left > 0:
                latest, left, tied = _search(
                    ids, last, count, held, first, rows, limit, most_uses, latest,
                    tl.min(oldest, 0), want * 0 + limit - 1, left, tied,
                    1, HELD, BY_COUNT, BLOCK,
                )  # fmt: skip
            if left > 0:
                low, high = _find_tied_ids(
                    ids, last, count, held, first, rows, most_uses, latest, HELD, BY_COUNT, BLOCK
                )
                greatest, left, tied = _search(
                    ids, last, count, held, first, rows, limit, most_uses, latest, low, high, left,
                    tied, 2, HELD, BY_COUNT, BLOCK,
                )  # fmt: skip
        empty_before = want * 0
        before = want * 0
        for begin in range(0, rows, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            used, uses, id = (
                held
                if HELD
                else _load_entries(ids, last, count, first, begin, rows, BY_COUNT, BLOCK)
            )
            free = used < 0
            goes = free & False
            if EVICTS:
                sooner = (used < latest) | ((used == latest) & (id <= greatest))
                if BY_COUNT:
                    sooner = (uses < most_uses) | ((uses == most_uses) & sooner)
                goes = (used >= 0) & (used < limit) & (need > 0) & sooner
            # One scan for both: a block has fewer entries than 16 bits count.
            both = free.to(tl.int32) | (goes.to(tl.int32) << 16)
            ranks = tl.cumsum(both, 0) - both
            number = empty_before + (ranks & 0xFFFF)
            tl.store(chosen + start + number, at, mask=free & (number < empties))
            number = empties + before + (ranks >> 16)
            tl.store(chosen + start + number, at, mask=goes)
            total = tl.sum(both, 0)
            empty_before += total & 0xFFFF
            before += total >> 16
    tl.store(taken + shard, empties + need)
    tl.store(evicted + shard, need)
    programs = tl.num_programs(0)
    if _is_last(scratch + CHOSEN, programs):
        tl.store(sums, _scan(taken, targets, programs, BLOCK))
        tl.store(sums + 1, _sum(evicted, programs, BLOCK))
        tl.store(sums + 2, _sum(wanted, programs, BLOCK))


@triton.jit(do_not_specialize=["shards", "padded", "rows", "batch"])
def assign_kernel(
    ids, last, count, scratch, choices, occurred, noted, shards, padded, rows, batch,
    ORDERS: tl.constexpr, BY_COUNT: tl.constexpr, OCCURRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for a shard: its missing ids, in their order, get the chosen entries, in theirs.
    Notes them from targets[shard] on. ORDERS: puts the missing ids in their order before. OCCURRED:
    their counts are given."""
    wanted, _, missing, _ = split_scratch(scratch, shards, padded)
    starts, targets, taken, evicted, ordered, _, chosen = _split_choices(choices, shards, padded)
    entries, lasts, counts, new_ids = split_noted(noted, padded)
    shard = tl.program_id(0).to(tl.int64)
    total = tl.load(taken + shard)
    empties = total - tl.load(evicted + shard)
    start = tl.load(starts + shard)
    target = tl.load(targets + shard)
    if ORDERS:
        _order(missing, tl.where(total > 0, tl.load(wanted + shard), 0), start, ordered, BLOCK)
        tl.debug_barrier()  # other threads of the program have written what one reads below
    for begin in range(0, total, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        entry = shard * rows + tl.load(chosen + start + at, mask=at < total, other=0)
        holds = (at >= empties) & (at < total)
        id = tl.load(ids + entry * ID, mask=holds, other=0)[:, None]
        used = tl.load(last + entry * USE, mask=holds, other=0)[:, None]
        if BY_COUNT:
            used_by = tl.load(count + entry * USE, mask=holds, other=0)[:, None]
        rank = tl.zeros([BLOCK], tl.int32)
        for other in range(empties, total, BLOCK):
            near = other + tl.arange(0, BLOCK)
            theirs = shard * rows + tl.load(chosen + start + near, mask=near < total, other=0)
            their_id = tl.load(ids + theirs * ID, mask=near < total, other=0)[None, :]
            their_last = tl.load(last + theirs * USE, mask=near < total, other=0)[None, :]
            sooner = (their_last < used) | ((their_last == used) & (their_id < id))
            if BY_COUNT:
                their_uses = tl.load(count + theirs * USE, mask=near < total, other=0)[None, :]
                sooner = (their_uses < used_by) | ((their_uses == used_by) & sooner)
            sooner = sooner & (near < total)[None, :]
            rank += tl.sum(sooner.to(tl.int32), 1)
        number = tl.where(holds, empties + rank, at)
        new = tl.load(ordered + start + number, mask=at < total, other=0)
        tl.store(entries + target + at, entry, mask=at < total)
        tl.store(new_ids + target + at, new, mask=at < total)
        tl.store(lasts + target + at, tl.zeros([BLOCK], tl.int32) + batch, mask=at < total)
        uses = tl.zeros([BLOCK], tl.int32) + 1
        if OCCURRED:
            uses = tl.load(occurred + start + number, mask=at < total, other=0)
        tl.store(counts + target + at, uses, mask=at < total)
