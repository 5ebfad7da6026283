"""The Triton kernels of `id_map` that list a batch's ids without an entry, each once, by shard.

The last program to finish computes the sums over all shards, without another kernel.
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
    """(begins of shards among missing ids, and among ids that get an entry; numbers of ids that get
    one, and of evicted ids; missing ids in order; their numbers in the shard; chosen entries): see
    triton_memory.py."""
    taken = (choices + 2 * shards).to(tl.pointer_type(tl.int32), bitcast=True)
    ordered = choices + 3 * shards
    numbers = (ordered + padded).to(tl.pointer_type(tl.int32), bitcast=True)
    return choices, choices + shards, taken, taken + shards, ordered, numbers, numbers + padded


@triton.jit
def is_last(through, programs):
    """Whether this program is the last of `programs` to call this, with a counter `through` [1]
    that starts at 0. The last one sees all earlier writes of the others."""
    # A barrier on each side of the count: all threads of a program write before one thread counts,
    # and all threads of the last program read after the count. Each count acquires what earlier
    # counts have released.
    tl.debug_barrier()
    before = tl.atomic_add(through, 1, sem="acq_rel")
    tl.debug_barrier()
    return before == programs - 1


@triton.jit
def scan(counts, starts, shards, BLOCK: tl.constexpr):
    """starts[shard]: the sum of the counts before it. Returns the total. Reads bypass the L1 cache:
    other programs wrote the counts."""
    before = tl.full((), 0, tl.int64)
    for begin in range(0, shards, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        each = tl.load(counts + at, mask=at < shards, other=0, cache_modifier=".cg")
        tl.store(starts + at, before + tl.cumsum(each, 0) - each, mask=at < shards)
        before += tl.sum(each, 0).to(tl.int64)
    return before


@triton.jit
def scan_and_sum(counts, starts, others, more, shards, BLOCK: tl.constexpr):
    """As `scan`; also returns the sums of `others` and of `more`. A step waits for memory once for
    all three."""
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
    """numbers[j]: the number of the key at places[j] among the missing keys of its shard, in any
    order; -1 for keys that do not count, and for all but one of equal keys. `claims`, 0 before, are
    an open-addressing table of the keys that count, with their places from 1. `wanted` is 0
    before; the last program scans it, and writes the number of places, totals[number], to
    `scratch` for the next kernels."""
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
        # atomic_cas has no mask: inactive lanes compare with a value that never occurs. So only
        # missing keys may come here: the others would all contend for one place.
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
    programs = tl.maximum(1, tl.cdiv(total, BLOCK))  # with work
    if program < programs:  # noqa: SIM102 - with `and`, all programs would count
        if is_last(scratch + CLAIMED, programs):
            scan(wanted, starts, shards, SHARD_BLOCK)
            tl.store(scratch, total)


@triton.jit
def collect(keys, scratch, choices, shards, padded, first_shard, bits, BLOCK: tl.constexpr):
    """Writes missing ids to the range of their shard, over the claims: all programs together."""
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
    """Collects missing ids before entries are chosen."""
    collect(keys, scratch, choices, shards, padded, first_shard, bits, BLOCK)


@triton.jit
def order(missing, want, start, ordered, BLOCK: tl.constexpr):
    """Orders the missing ids of a shard, ascending."""
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
    """Orders the missing ids of each shard, one program for each."""
    wanted, _, missing, _ = split_scratch(scratch, shards, padded)
    starts, _, _, _, ordered, _, _ = split_choices(choices, shards, padded)
    shard = tl.program_id(0)
    order(missing, tl.load(wanted + shard), tl.load(starts + shard), ordered, BLOCK)
