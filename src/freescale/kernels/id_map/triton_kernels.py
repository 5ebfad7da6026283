"""The Triton kernels of `id_map` that find, insert and remove ids by their buckets.

A bucket is 8 words of 32 bits, one sector of memory: 7 entries and a word about them. An entry is a
row of the shard, counted from 1, with some bits of the id's hash above it; 0 is an empty entry.
Bits 0 to 6 of the last word mark the entries in use. From bit 8 on it counts the ids that start at
this bucket or before it, found it full, and are in a later one. A search ends at a bucket that
counts none, so removed ids leave no marks.

Many programs write words at once: a program claims an entry of a bucket by setting its bit, and all
other changes commute. The order of two ids in a bucket is undetermined, and no result shows it. No
kernel both inserts and removes.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.draw_kernels import _mix

WORDS = tl.constexpr(8)  # of a bucket
# An entry is 16 bytes: its id, last use and count. From one to the next, in items of each:
ID = tl.constexpr(2)
USE = tl.constexpr(4)
LAST = tl.constexpr(7)  # the word about the entries
PASSED = tl.constexpr(256)  # in that word: one id in a later bucket
FIRST_INVERSE = tl.constexpr(0x96DE1B173F119089)  # of the constants of freescale.random
SECOND_INVERSE = tl.constexpr(0x319642B2D24D8EC3)
SIGN = tl.constexpr(0x8000000000000000)
TOP = tl.constexpr(2**63 - 1)
BOTTOM = tl.constexpr(-(2**63))
MOST = tl.constexpr(2**31 - 1)
MARK = tl.constexpr(-(2**31))
# The first words of scratch memory. Word 0 is the number of keys without an entry; CLAIMED and
# CHOSEN count the programs of two kernels that have finished.
HEAD = tl.constexpr(32)
CLAIMED = tl.constexpr(4)
CHOSEN = tl.constexpr(8)


# ---- hashes, in unsigned 64 bits


@triton.jit
def unmix(x):
    x = (x ^ (x >> 31) ^ (x >> 62)) * SECOND_INVERSE
    x = (x ^ (x >> 27) ^ (x >> 54)) * FIRST_INVERSE
    return x ^ (x >> 30) ^ (x >> 60)


@triton.jit
def load_hashes(keys, i, there):
    return tl.load(keys + i, mask=there, other=0).to(tl.uint64, bitcast=True) ^ SIGN


@triton.jit
def find_shard(hash, bits):
    return (hash >> bits.to(tl.uint64)).to(tl.int64)


@triton.jit
def _find_bucket(hash, buckets):
    """The first bucket of an id: by 32 bits of its hash, below the shard's 12 at most."""
    return (((hash >> 20) & 0xFFFFFFFF).to(tl.int64) * buckets) >> 32


@triton.jit
def _make_tag(hash, row_bits):
    """The bits of a hash in an entry, above the row: up to 20, which do not determine the
    bucket."""
    held = tl.minimum(31 - row_bits, 20)
    return ((hash & 0xFFFFF).to(tl.int32)) & ((1 << held) - 1)


# ---- pieces of memory


@triton.jit
def split_noted(noted, padded):
    """(entries, last uses, counts, ids), `padded` of each: the values to swap with the map. Without
    ids if these do not change."""
    last = (noted + padded).to(tl.pointer_type(tl.int32), bitcast=True)
    return noted, last, last + padded, noted + 2 * padded


@triton.jit
def split_scratch(scratch, shards, padded):
    """(missing ids of each shard, claims of 2 `padded` places, the same memory as missing ids,
    places of keys without an entry): see triton_memory.py."""
    wanted = scratch + HEAD
    claims = wanted + shards
    missing = claims.to(tl.pointer_type(tl.int64), bitcast=True)
    return wanted, claims, missing, claims + 2 * padded


# ---- one id, one entry


@triton.jit
def search(
    words, ids, hash, wanted, first_shard, bits, rows, buckets, row_bits, BLOCK: tl.constexpr
):  # fmt: skip
    """The entries [BLOCK] of ids with these hashes; -1 for ids without one."""
    id = unmix(hash).to(tl.int64, bitcast=True)
    shard = tl.where(wanted, find_shard(hash, bits) - first_shard, 0)
    tag = _make_tag(hash, row_bits)
    bucket = _find_bucket(hash, buckets)
    lane = tl.arange(0, WORDS)[None, :]
    row_mask = (1 << row_bits) - 1
    entry = tl.zeros([BLOCK], tl.int64) - 1
    below = tl.zeros([BLOCK], tl.int32) + MOST  # lower rows of this bucket are untried
    steps = tl.zeros([BLOCK], tl.int32)
    active = wanted
    while tl.max(active.to(tl.int32), 0) > 0:
        base = (shard * buckets + bucket) * WORDS
        word = tl.load(words + base[:, None] + lane, mask=active[:, None], other=0)
        row = word & row_mask
        like = (lane < LAST) & ((word >> row_bits) == tag[:, None]) & (row < below[:, None])
        row = tl.max(tl.where(like, row, 0), 1)  # few share a tag: one at a time
        about = tl.sum(tl.where(lane == LAST, word, 0), 1)
        like = active & (row > 0)
        place = shard * rows + row - 1
        held = tl.load(ids + place * ID, mask=like, other=0)
        hit = like & (held == id)
        entry = tl.where(hit, place, entry)
        other = like & (held != id)
        below = tl.where(other, row, MOST)
        steps += tl.where(other, 0, 1)
        active = active & (hit == 0) & (other | ((about >= PASSED) & (steps < buckets)))
        bucket = tl.where(other, bucket, tl.where(bucket + 1 < buckets, bucket + 1, 0))
    return entry


# `keys` and `counted` begin anywhere in the tensors of a batch.
@triton.jit(
    do_not_specialize=["n", "absent", "first_shard", "bits", "rows", "buckets", "row_bits"],
    do_not_specialize_on_alignment=["keys"],
)
def find_kernel(
    words, ids, keys, found, n, absent, first_shard, bits, rows, buckets, row_bits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """found[i]: the entry of keys[i], or `absent`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    hash = load_hashes(keys, i, i < n)
    entry = search(words, ids, hash, i < n, first_shard, bits, rows, buckets, row_bits, BLOCK)
    tl.store(found + i, tl.where(entry < 0, absent, entry), mask=i < n)


@triton.jit(
    do_not_specialize=[
        "number", "shards", "padded", "n", "absent", "batch", "first_shard", "bits", "rows",
        "buckets", "row_bits",
    ],
    do_not_specialize_on_alignment=["keys"],
)  # fmt: skip
def look_up_kernel(
    words, ids, last, count, keys, found, noted, scratch, numbers, number, shards, padded,
    n, absent, batch, first_shard, bits, rows, buckets, row_bits,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found[i]: the entry of keys[i]; without one `absent`, and i is among the places.
    numbers[number] counts these, from 0. One read of an entry is the first to exchange its last
    use: it saves the previous values and, with COUNTS, counts the batch. Clears the scratch memory
    that must be 0 for the next kernels."""
    entries, lasts, counts, _ = split_noted(noted, padded)
    wanted, _, claims, places = split_scratch(scratch, shards, padded)
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(claims + i, tl.zeros([BLOCK], tl.int64), mask=i < padded)
    for begin in range(program * BLOCK, shards, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(wanted + at, tl.zeros([BLOCK], tl.int32), mask=at < shards)
    if program == 0:
        tl.store(scratch + CLAIMED, 0)
        tl.store(scratch + CHOSEN, 0)
    hash = load_hashes(keys, i, i < n)
    entry = search(words, ids, hash, i < n, first_shard, bits, rows, buckets, row_bits, BLOCK)
    there = entry >= 0
    now = tl.zeros([BLOCK], tl.int32) + batch
    before = tl.atomic_xchg(last + entry * USE, now, mask=there, sem="relaxed")
    first = there & (before != now)
    held = tl.load(count + entry * USE, mask=first, other=0)
    tl.store(found + i, tl.where(there, entry, absent), mask=i < n)
    tl.store(entries + i, tl.where(first, entry, -1), mask=i < n)
    tl.store(lasts + i, before, mask=first)
    tl.store(counts + i, held, mask=first)
    if COUNTS:
        tl.store(count + entry * USE, tl.where(held == MOST, held, held + 1), mask=first)
    missing = ((i < n) & (entry < 0)).to(tl.int32)
    begin = tl.atomic_add(numbers + number, tl.sum(missing, 0), sem="relaxed")
    tl.store(places + begin + tl.cumsum(missing, 0) - 1, i.to(tl.int32), mask=missing != 0)


@triton.jit(
    do_not_specialize=["n", "absent", "first_shard", "bits", "rows", "buckets", "row_bits"],
    do_not_specialize_on_alignment=["keys"],
)
def read_kernel(
    words, ids, keys, weight, out, n, absent, first_shard, bits, rows, buckets, row_bits,
    WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out[i]: the row of keys[i], or row `absent`. A program reads R rows of up to W columns: some
    programs wait for rows while others still search."""
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    hash = load_hashes(keys, i, i < n)
    entry = search(words, ids, hash, i < n, first_shard, bits, rows, buckets, row_bits, R)
    row = tl.where(entry < 0, absent, entry)
    column = tl.arange(0, W)[None, :]
    there = (i < n)[:, None] & (column < WIDTH)
    values = tl.load(weight + row[:, None] * WIDTH + column, mask=there, other=0.0)
    tl.store(out + i[:, None] * WIDTH + column, values.to(out.dtype.element_ty), mask=there)


@triton.jit(
    do_not_specialize=["shards", "padded", "first_shard", "bits", "rows", "buckets", "row_bits"],
    do_not_specialize_on_alignment=["keys"],
)
def find_again_kernel(
    words, ids, keys, found, scratch, shards, padded, first_shard, bits, rows, buckets, row_bits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the entries of keys that had none before and have one now."""
    _, _, _, places = split_scratch(scratch, shards, padded)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = j < tl.load(scratch)
    i = tl.load(places + j, mask=there, other=0)
    hash = load_hashes(keys, i, there)
    entry = search(words, ids, hash, there, first_shard, bits, rows, buckets, row_bits, BLOCK)
    tl.store(found + i, entry, mask=entry >= 0)


@triton.jit(do_not_specialize=["n", "absent"], do_not_specialize_on_alignment=["counted"])
def mark_counted_kernel(count, found, counted, n, absent, BLOCK: tl.constexpr):
    """Sets the sign of the counts of entries with a counted read."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(counted + i, mask=i < n, other=0) != 0
    entry = tl.load(found + i, mask=counts, other=absent)
    mark = tl.zeros([BLOCK], tl.int32) + MARK
    tl.atomic_or(count + entry * USE, mark, mask=entry != absent, sem="relaxed")


@triton.jit(do_not_specialize=["n"])
def count_marked_kernel(count, entries, n, BLOCK: tl.constexpr):
    """Counts the batch for entries with the sign set, and clears the sign. entries: each once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(entries + i, mask=i < n, other=-1)
    held = tl.load(count + entry * USE, mask=entry >= 0, other=0)
    uses = held & MOST
    uses = tl.where(uses == MOST, uses, uses + 1)
    tl.store(count + entry * USE, uses, mask=(entry >= 0) & (held < 0))


@triton.jit(do_not_specialize=["padded", "n"])
def swap_uses_kernel(last, count, noted, padded, n, BLOCK: tl.constexpr):
    entries, lasts, counts, _ = split_noted(noted, padded)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(entries + i, mask=i < n, other=-1)
    there = entry >= 0
    _swap(last, entry * USE, lasts, i, there)
    _swap(count, entry * USE, counts, i, there)


@triton.jit
def _swap(table, place, noted, i, there):
    held = tl.load(table + place, mask=there, other=0)
    other = tl.load(noted + i, mask=there, other=0)
    tl.store(table + place, other, mask=there)
    tl.store(noted + i, held, mask=there)


# ---- changes of ids


@triton.jit
def _locate_entry(ids, entry, there, rows):
    """(hash of the id, shard, row counted from 1) of entries."""
    hash = _mix(tl.load(ids + entry * ID, mask=there, other=0).to(tl.uint64, bitcast=True))
    shard = tl.where(there, entry, 0) // rows
    return hash, shard, (tl.where(there, entry, 0) - shard * rows + 1).to(tl.int32)


@triton.jit(do_not_specialize=["padded", "n", "rows", "buckets", "row_bits"])
def take_out_kernel(
    words, ids, last, count, noted, total, came, padded, n, rows, buckets, row_bits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Removes the ids of n entries from their buckets, and swaps entries with the noted values.
    total [1], if given: only the first total[0] of n. came [n], if given, receives the new ids."""
    entries, lasts, counts, new_ids = split_noted(noted, padded)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if total is not None:
        n = tl.load(total)
    entry = tl.load(entries + i, mask=i < n, other=-1)
    there = entry >= 0
    active = there & (tl.load(last + entry * USE, mask=there, other=-1) >= 0)
    hash, shard, row = _locate_entry(ids, entry, active, rows)
    bucket = _find_bucket(hash, buckets)
    lane = tl.arange(0, WORDS)[None, :]
    row_mask = (1 << row_bits) - 1
    steps = tl.zeros([BLOCK], tl.int32)
    while tl.max(active.to(tl.int32), 0) > 0:
        base = (shard * buckets + bucket) * WORDS
        word = tl.load(words + base[:, None] + lane, mask=active[:, None], other=0)
        mine = (lane < LAST) & ((word & row_mask) == row[:, None]) & active[:, None]
        place = tl.max(tl.where(mine, lane, -1), 1)
        here = active & (place >= 0)
        tl.store(words + base + place, tl.zeros([BLOCK], tl.int32), mask=here)
        kept = -1 ^ (1 << tl.maximum(place, 0))
        tl.atomic_and(words + base + LAST, kept, mask=here, sem="relaxed")
        less = tl.zeros([BLOCK], tl.int32) - PASSED
        tl.atomic_add(words + base + LAST, less, mask=active & (place < 0), sem="relaxed")
        steps += 1
        active = active & (place < 0) & (steps < buckets)
        bucket = tl.where(bucket + 1 < buckets, bucket + 1, 0)
    if came is not None:
        tl.store(came + i, tl.load(new_ids + i, mask=there, other=0), mask=there)
    _swap(ids, entry * ID, new_ids, i, there)
    _swap(last, entry * USE, lasts, i, there)
    _swap(count, entry * USE, counts, i, there)


@triton.jit(do_not_specialize=["n", "begin", "rows", "buckets", "row_bits"])
def put_in_kernel(
    words, ids, last, entries, total, n, begin, rows, buckets, row_bits,
    ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Inserts the ids of entries into buckets; ALL: n entries from `begin` on. total: as above."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if total is not None:
        n = tl.load(total)
    entry = tl.where(i < n, begin + i, -1)
    if not ALL:
        entry = tl.load(entries + i, mask=i < n, other=-1)
    active = entry >= 0
    active = active & (tl.load(last + entry * USE, mask=active, other=-1) >= 0)
    hash, shard, row = _locate_entry(ids, entry, active, rows)
    value = (_make_tag(hash, row_bits) << row_bits) | row
    bucket = _find_bucket(hash, buckets)
    while tl.max(active.to(tl.int32), 0) > 0:
        base = (shard * buckets + bucket) * WORDS
        # Bypasses the L1 cache, which may be stale. A stale word only lacks bits, and then the
        # claim fails.
        about = tl.load(words + base + LAST, mask=active, other=0, cache_modifier=".cg")
        free = (about & 127) ^ 127
        full = active & (free == 0)
        bit = free & (0 - free)
        before = tl.atomic_or(words + base + LAST, bit, mask=active & (free != 0), sem="relaxed")
        mine = active & (free != 0) & ((before & bit) == 0)
        place = tl.zeros([BLOCK], tl.int32)
        for number in tl.static_range(1, 7):
            place += ((bit >> number) != 0).to(tl.int32)
        tl.store(words + base + place, value, mask=mine)
        more = tl.zeros([BLOCK], tl.int32) + PASSED
        tl.atomic_add(words + base + LAST, more, mask=full, sem="relaxed")
        bucket = tl.where(full, tl.where(bucket + 1 < buckets, bucket + 1, 0), bucket)
        active = active & (mine == 0)
