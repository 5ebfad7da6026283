"""The Triton kernels of `id_map` for the ids of a batch without an entry: each once, by shard.

Sums over all shards are those of the last program that is through: no kernel is launched for them.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.id_map.triton_kernels import (
    CLAIMED,
    SIGN,
    TOP,
    find_shard,
    load_hashes,
    split_scratch,
    unmix,
)


@triton.jit
def split_choices(choices, shards, padded):
    """(where shards begin among missing ids, and among those that get an entry; how many they get,
    and of them by eviction; missing ids in order; the number of each among those of its shard, and
    chosen entries): see id_map_memory.py."""
    taken = (choices + 2 * shards).to(tl.pointer_type(tl.int32), bitcast=True)
    ordered = choices + 3 * shards
    numbers = (ordered + padded).to(tl.pointer_type(tl.int32), bitcast=True)
    return choices, choices + shards, taken, taken + shards, ordered, numbers, numbers + padded


@triton.jit
def is_last(through, programs):
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
def scan(counts, starts, shards, BLOCK: tl.constexpr):
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
def scan_and_sum(counts, starts, others, more, shards, BLOCK: tl.constexpr):
    """As `scan`; returns also the sums of the `others`, and of `more`. Each step waits for memory,
    once for all of them."""
    before = tl.full((), 0, tl.int64)
    other = tl.zeros([BLOCK], tl.int32)
    third = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, shards, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        each = tl.load(counts + at, mask=at < shards, other=0, cache_modifier=".cg")
        other += tl.load(others + at, mask=at < shards, other=0, cache_modifier=".cg")
        third += tl.load(more + at, mask=at < shards, other=0, cache_modifier=".cg")
        tl.store(starts + at, before + tl.cumsum(each, 0) - each, mask=at < shards)
        before += tl.sum(each, 0).to(tl.int64)
    return before, tl.sum(other, 0).to(tl.int64), tl.sum(third, 0).to(tl.int64)


@triton.jit(
    do_not_specialize=["number", "shards", "padded", "first_shard", "bits"],
    do_not_specialize_on_alignment=["keys", "counted"],
)
def claim_kernel(
    keys, counted, totals, number, scratch, choices, shards, padded, first_shard, bits,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr, SHARD_BLOCK: tl.constexpr,
):  # fmt: skip
    """numbers[j]: the number of the key at places[j] among the missing ones of its shard, in any
    order; -1 for those that do not count, and all but one of equal ones. Claims are 0 before,
    afterwards an open-addressing table of the ones that count, each with its place counted from 1.
    What shards want is 0 before; the last program scans it, and says for the kernels behind this
    one how many places there are: totals[number]."""
    wanted, claims, _, places = split_scratch(scratch, shards, padded)
    starts, _, _, _, _, numbers, _ = split_choices(choices, shards, padded)
    size = 2 * padded
    program = tl.program_id(0)
    j = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(totals + number)
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
    shard = find_shard(hash, bits) - first_shard
    rank = tl.atomic_add(wanted + shard, one, mask=first, sem="relaxed")
    tl.store(numbers + j, tl.where(first, rank, -1), mask=there)
    programs = tl.maximum(1, tl.cdiv(total, BLOCK))  # that have something to do
    if program < programs:  # noqa: SIM102 - with `and`, all programs would count
        if is_last(scratch + CLAIMED, programs):
            scan(wanted, starts, shards, SHARD_BLOCK)
            tl.store(scratch, total)


@triton.jit
def collect(keys, scratch, choices, shards, padded, first_shard, bits, BLOCK: tl.constexpr):
    """Puts missing ids in the range of their shard, where claims were: all programs together."""
    _, _, missing, places = split_scratch(scratch, shards, padded)
    starts, _, _, _, _, numbers, _ = split_choices(choices, shards, padded)
    total = tl.load(scratch)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        j = begin + tl.arange(0, BLOCK)
        rank = tl.load(numbers + j, mask=j < total, other=-1)
        there = rank >= 0
        i = tl.load(places + j, mask=there, other=0)
        hash = load_hashes(keys, i, there)
        start = tl.load(starts + find_shard(hash, bits) - first_shard, mask=there, other=0)
        tl.store(missing + start + rank, unmix(hash).to(tl.int64, bitcast=True), mask=there)


@triton.jit(
    do_not_specialize=["shards", "padded", "first_shard", "bits"],
    do_not_specialize_on_alignment=["keys"],
)
def collect_kernel(
    keys, scratch, choices, shards, padded, first_shard, bits, BLOCK: tl.constexpr
):  # fmt: skip
    """For who wants them before entries are chosen."""
    collect(keys, scratch, choices, shards, padded, first_shard, bits, BLOCK)


@triton.jit
def order(missing, want, start, ordered, BLOCK: tl.constexpr):
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
    starts, _, _, _, ordered, _, _ = split_choices(choices, shards, padded)
    shard = tl.program_id(0)
    order(missing, tl.load(wanted + shard), tl.load(starts + shard), ordered, BLOCK)
