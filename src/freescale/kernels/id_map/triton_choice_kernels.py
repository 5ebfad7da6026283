"""The Triton kernels of `id_map` that choose an entry for each id of a batch without one.

Shards are independent, with a program for each. It searches the bounds of (count, last use, id) up
to which entries are evicted, one after the other; each step is a walk through the shard. Two of
three steps interpolate, as if entries were evenly spread, and the third bisects: few steps for
typical ids, and never more than three times those of a bisection. The search ends as soon as a
bound has the right number of entries below it. The words of a small shard are read once for each
bound and kept in registers (HELD). They have 32 bits, with ids in two halves: with fewer registers,
more programs can wait for memory at the same time.

The last program to finish computes the sums over all shards, without another kernel.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.id_map.triton_kernels import (
    CHOSEN,
    ID,
    MARK,
    MOST,
    USE,
    split_noted,
    split_scratch,
)
from freescale.kernels.id_map.triton_missing_kernels import (
    collect,
    is_last,
    order,
    scan_and_sum,
    split_choices,
)

# The levels of the order of entries, and the words of an entry that they compare.
BY_USES = tl.constexpr(0)
BY_LAST = tl.constexpr(1)
BY_UPPER = tl.constexpr(2)  # half of the id
BY_LOWER = tl.constexpr(3)
LOWER = tl.constexpr(0)
UPPER = tl.constexpr(1)
LAST_USE = tl.constexpr(2)
COUNT = tl.constexpr(3)
LOWER_SIGN = tl.constexpr(-(2**31))  # lower halves have none: flipped, they are ordered as numbers


@triton.jit
def _load_entries(entries, at, rows):
    """(lower and upper halves of ids, last uses, counts) of entries of a shard; MOST behind its
    end. One load of 16 bytes for each entry: word by word, a warp would access four times as many
    cache lines."""
    place = tl.arange(0, USE)[None, :]
    words = tl.load(
        entries + at[:, None] * USE + place, mask=(at < rows)[:, None], other=MOST
    )  # fmt: skip
    lower = tl.sum(tl.where(place == LOWER, words, 0), 1) ^ LOWER_SIGN
    upper = tl.sum(tl.where(place == UPPER, words, 0), 1)
    used = tl.sum(tl.where(place == LAST_USE, words, 0), 1)
    return lower, upper, used, tl.sum(tl.where(place == COUNT, words, 0), 1)


@triton.jit
def _load_candidates(
    entries, begin, rows, limit, most_uses, latest, upper,
    LEVEL: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(mask of the entries of a shard, from `begin` on, that may be evicted and are equal to the
    given count, last use and upper half of an id on the levels before LEVEL; their words at
    LEVEL)."""
    lower_half, upper_half, used, uses = _load_entries(entries, begin + tl.arange(0, BLOCK), rows)
    able = (used >= 0) & (used < limit)
    word = used
    if BY_COUNT:
        if LEVEL == BY_USES:
            word = uses
        else:
            able = able & (uses == most_uses)
    if LEVEL >= BY_UPPER:
        able = able & (used == latest)
        word = upper_half
    if LEVEL >= BY_LOWER:
        able = able & (upper_half == upper)
        word = lower_half
    return able, word


@triton.jit
def _find_range(
    entries, rows, limit, most_uses, latest, upper,
    LEVEL: tl.constexpr, HELD: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(the least word of the candidates; the greatest; the words of the last block, MOST for
    entries that are no candidates)."""
    low = tl.zeros([BLOCK], tl.int32) + MOST
    high = tl.zeros([BLOCK], tl.int32) + MARK
    held = low
    for begin in range(0, BLOCK if HELD else rows, BLOCK):
        able, word = _load_candidates(
            entries, begin, rows, limit, most_uses, latest, upper, LEVEL, BY_COUNT, BLOCK
        )
        held = tl.where(able, word, MOST)
        low = tl.minimum(low, held)
        high = tl.maximum(high, tl.where(able, word, MARK))
    return tl.min(low, 0), tl.max(high, 0), held


@triton.jit
def _guess(low, high, need, below, above):
    """The bound, below `high`, with `need` entries up to it, if their number grew linearly from
    `below` at `low` to `above` at `high`."""
    share = (need - below + 0.5) / (above - below + 1.0).to(tl.float64)  # well below 1
    width = high.to(tl.int64) - low
    step = (width.to(tl.float64) * share).to(tl.int64)
    return (low + tl.minimum(step, width - 1)).to(tl.int32)


@triton.jit
def _search(
    entries, rows, limit, most_uses, latest, upper, held, low, high, need, above,
    LEVEL: tl.constexpr, HELD: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(bound in [low, high] with exactly `need` candidates up to it or, if there is none, the least
    bound with more; how many of the candidates equal to the bound are needed, 0 for all; how many
    are equal, if not all are needed). No candidate is below `low`, and `above` of them, more than
    `need`, are up to `high`. HELD: `held` has the words of all candidates, and MOST for others,
    which is above every bound tried."""
    below = need * 0
    turn = need * 0
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without a sum
        middle = tl.where(turn < 2, _guess(low, high, need, below, above), middle)
        turn = tl.where(turn < 2, turn + 1, 0)
        total = tl.zeros([BLOCK], tl.int32)
        if HELD:
            total += (held <= middle).to(tl.int32)
        else:
            for begin in range(0, rows, BLOCK):
                able, word = _load_candidates(
                    entries, begin, rows, limit, most_uses, latest, upper, LEVEL, BY_COUNT, BLOCK
                )
                total += (able & (word <= middle)).to(tl.int32)
        there = tl.sum(total, 0)
        below = tl.where(there <= need, there, below)
        above = tl.where(there < need, above, there)
        low = tl.where(there < need, middle + 1, tl.where(there == need, middle, low))
        high = tl.where(there < need, high, middle)
    return low, need - below, above - below


@triton.jit(do_not_specialize=["rows", "limit"])
def room_kernel(
    last, wanted, room, rows, limit, EVICTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """room[shard]: the number of missing ids for which `choose_kernel` has entries."""
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


@triton.jit(
    do_not_specialize=["shards", "padded", "first_shard", "bits", "rows", "limit"],
    do_not_specialize_on_alignment=["keys"],
)
def choose_kernel(
    ids, keys, scratch, choices, sums, host_sums, shards, padded, first_shard, bits, rows, limit,
    BY_COUNT: tl.constexpr, EVICTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr, SHARD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects the missing ids if their keys are given; this kernel does not read them.

    A program chooses entries for the missing ids of its shard, as far as there are enough: the
    lowest empty entries, ascending, then the first entries in the order of eviction, also ascending
    by number; `assign_kernel` orders these. `chosen` has their numbers in the shard. The last
    program scans the entries taken by each shard, and sums the taken, evicted and wanted ones:
    sums [3], and host_sums [3] if given."""
    if keys is not None:
        collect(keys, scratch, choices, shards, padded, first_shard, bits, SCAN)
    # A name in a Triton loop must keep its type: `_` has another one below.
    wanted, claims, missing, places = split_scratch(scratch, shards, padded)
    starts, targets, taken, evicted, ordered, numbers, chosen = split_choices(
        choices, shards, padded
    )
    shard = tl.program_id(0).to(tl.int64)
    want = tl.load(wanted + shard)
    start = tl.load(starts + shard)
    entries = (ids + shard * rows * ID).to(tl.pointer_type(tl.int32), bitcast=True)
    empties = want * 0
    need = want * 0
    if want > 0:
        empty = tl.zeros([BLOCK], tl.int32)
        able = tl.zeros([BLOCK], tl.int32)
        low = tl.zeros([BLOCK], tl.int32) + MOST
        high = tl.zeros([BLOCK], tl.int32)
        held = low
        for begin in range(0, BLOCK if HELD else rows, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            rest, half, used, uses = _load_entries(entries, at, rows)
            empty += (used < 0).to(tl.int32)
            if EVICTS:
                old = (used >= 0) & (used < limit)
                able += old.to(tl.int32)
                word = used
                if BY_COUNT:
                    word = uses
                    high = tl.maximum(high, tl.where(old, word, 0))
                held = tl.where(old, word, MOST)
                low = tl.minimum(low, held)
        if HELD:  # one sum for both: a block has fewer entries than 16 bits count
            pair = tl.sum(empty | (able << 16), 0)
            empties = tl.minimum(pair & 0xFFFF, want)
            ables = pair >> 16
        else:
            empties = tl.minimum(tl.sum(empty, 0), want)
            ables = tl.sum(able, 0)
        need = tl.minimum(ables, want - empties)
        # the bounds of (count, last use, id) for eviction; first, all entries
        most_uses = want * 0 + MOST
        latest = want * 0 + limit
        upper = want * 0 + MOST
        lower = want * 0 + MOST
        if (need > 0) & (need < ables):
            left = need
            tied = ables
            least = tl.min(low, 0)
            most = want * 0 + limit - 1
            if BY_COUNT:
                most_uses, left, tied = _search(
                    entries, rows, limit, most_uses, latest, latest, held, least, tl.max(high, 0),
                    left, tied, BY_USES, HELD, BY_COUNT, BLOCK,
                )  # fmt: skip
                if left > 0:
                    least, most, held = _find_range(
                        entries, rows, limit, most_uses, latest, latest,
                        BY_LAST, HELD, BY_COUNT, BLOCK,
                    )  # fmt: skip
            if left > 0:
                latest, left, tied = _search(
                    entries, rows, limit, most_uses, latest, latest, held, least, most,
                    left, tied, BY_LAST, HELD, BY_COUNT, BLOCK,
                )  # fmt: skip
            if left > 0:
                least, most, held = _find_range(
                    entries, rows, limit, most_uses, latest, latest, BY_UPPER, HELD, BY_COUNT, BLOCK
                )
                upper, left, tied = _search(
                    entries, rows, limit, most_uses, latest, latest, held, least, most,
                    left, tied, BY_UPPER, HELD, BY_COUNT, BLOCK,
                )  # fmt: skip
                if left > 0:
                    least, most, held = _find_range(
                        entries, rows, limit, most_uses, latest, upper,
                        BY_LOWER, HELD, BY_COUNT, BLOCK,
                    )  # fmt: skip
                    lower, left, tied = _search(
                        entries, rows, limit, most_uses, latest, upper, held, least, most,
                        left, tied, BY_LOWER, HELD, BY_COUNT, BLOCK,
                    )  # fmt: skip
        empty_before = want * 0
        before = want * 0
        for begin in range(0, rows, SCAN):
            at = begin + tl.arange(0, SCAN)
            rest, half, used, uses = _load_entries(entries, at, rows)
            free = used < 0
            goes = free & False
            if EVICTS:
                old = (used >= 0) & (used < limit) & (need > 0)
                same = old & (used == latest)
                sooner = (half < upper) | ((half == upper) & (rest <= lower))
                sooner = (used < latest) | (same & sooner)
                if BY_COUNT:
                    sooner = (uses < most_uses) | ((uses == most_uses) & sooner)
                goes = old & sooner
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
    if is_last(scratch + CHOSEN, programs):
        all_taken, all_evicted, all_wanted = scan_and_sum(
            taken, targets, evicted, wanted, programs, SHARD_BLOCK
        )
        tl.store(sums, all_taken)
        tl.store(sums + 1, all_evicted)
        tl.store(sums + 2, all_wanted)
        if host_sums is not None:
            tl.store(host_sums, all_taken)
            tl.store(host_sums + 1, all_evicted)
            tl.store(host_sums + 2, all_wanted)


@triton.jit(do_not_specialize=["shards", "padded", "rows", "batch"])
def assign_kernel(
    ids, last, count, scratch, choices, occurred, noted, shards, padded, rows, batch,
    ORDERS: tl.constexpr, BY_COUNT: tl.constexpr, OCCURRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program assigns the chosen entries of its shard, in order, to the missing ids, in order,
    and writes them from targets[shard] on. ORDERS: orders the missing ids first. OCCURRED: their
    counts are given."""
    wanted, _, missing, _ = split_scratch(scratch, shards, padded)
    starts, targets, taken, evicted, ordered, _, chosen = split_choices(choices, shards, padded)
    entries, lasts, counts, new_ids = split_noted(noted, padded)
    shard = tl.program_id(0).to(tl.int64)
    total = tl.load(taken + shard)
    empties = total - tl.load(evicted + shard)
    start = tl.load(starts + shard)
    target = tl.load(targets + shard)
    if ORDERS:
        order(missing, tl.where(total > 0, tl.load(wanted + shard), 0), start, ordered, BLOCK)
        tl.debug_barrier()  # makes writes of other threads visible to the loop below
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
