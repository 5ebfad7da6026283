"""Streams of ids through a device directory, beside the directory of the host. As a program: its
Triton kernels through the interpreter, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from freescale.embedding.dynamic import device_directory
from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import Decided, Directory
from freescale.embedding.dynamic_rules import SHARDS, After, Dynamic, Seen
from freescale.embedding.layout import TableSpec, compute_keys
from freescale.embedding.storage.api import draw_initial_rows
from freescale.kernels.id_map import reference as draws
from freescale.kernels.id_map import triton as triton_id_map
from freescale.kernels.id_map import triton_memory as id_map_memory
from freescale.kernels.row_moves import triton as row_exchange
from freescale.random import derive, hash_name, mix
from helpers import plain_id_map as id_map
from helpers.dynamic_oracle import FineDynamic
from helpers.dynamic_streams import SPECIAL, id_in


@contextmanager
def by_kernels(kernels) -> Iterator[None]:
    """Device directories that are made inside use this module."""
    before, device_directory.kernels = device_directory.kernels, kernels
    try:
        yield
    finally:
        device_directory.kernels = before


class Pair:
    """A directory on the host, and one on a device, that see the same batches."""

    def __init__(self, rules, shards, device="cpu"):
        self.host = Directory(rules, *shards)
        self.device = DeviceDirectory(rules, *shards, torch.device(device))

    def decide(self, keys, counted=None):
        """The decisions of both, on the host, and whether they are the same."""
        device = self.device._device
        marks = None if counted is None else counted.to(device)
        decided = self.host.decide(keys, counted), self.device.decide(keys.to(device), marks)
        return decided, self.agree(*decided) and self.same_state()

    def agree(self, host: Decided, device: Decided) -> bool:
        entries = host.entries[host.inverse], device.entries.cpu()
        # behind the ids that come there may be anything
        new = [dict(zip(d.new.tolist(), d.new_ids.tolist(), strict=False)) for d in (host, device)]
        gone = [
            set() if d.removed is None else set(d.removed.tolist()) - {-1} for d in (host, device)
        ]
        return (
            torch.equal(*entries)
            and new[0] == new[1]
            and gone[0] == gone[1]
            and host.figures == device.figures
        )

    def same_state(self) -> bool:
        both = zip(
            self.host.get_tensors().values(), self.device.get_tensors().values(), strict=True
        )
        counters = [part.get_shard_tensors() for part in (self.host, self.device)]
        return (
            all(torch.equal(a, b.cpu()) for a, b in both)
            and all(torch.equal(value, counters[1][name]) for name, value in counters[0].items())
            and self.host.used == self.device.used
            and self.host.batches == self.device.batches
        )

    def same_answers(self, keys) -> bool:
        return torch.equal(
            self.host.find(keys), self.device.find(keys.to(self.device._device)).cpu()
        )

    def undo(self, decided) -> bool:
        for part, made in zip((self.host, self.device), decided):
            part.undo(made.changes)
        return self.same_state()

    def redo(self, decided) -> bool:
        for part, made in zip((self.host, self.device), decided):
            part.redo(made.changes)
        return self.same_state()


def draw_stream(shards, numbers, batches, size, seed=0):
    """Keys of batches, as often as they come, with marks of those that count; None: all do."""
    generator = np.random.default_rng(seed)
    pool = [id_in(shard, n) for shard in range(*shards) for n in range(numbers)]
    keys = compute_keys(torch.tensor(pool + SPECIAL))
    inside = (keys >> 52) + SHARDS // 2
    keys = keys[(inside >= shards[0]) & (inside < shards[1])]
    for number in range(batches):
        window = keys[number * 3 % (len(keys) // 2) :]
        drawn = window[torch.from_numpy(generator.integers(0, len(window), size))]
        marks = torch.from_numpy(generator.integers(0, 2, size).astype(np.uint8))
        yield drawn, marks if number % 3 == 2 else None


def compare(rules, shards, stream, device="cpu"):
    """What held throughout a stream."""
    pair = Pair(rules, shards, device)
    held = dict.fromkeys(("decisions", "undone", "redone", "answers", "decided again"), True)
    totals = np.zeros(4, int)
    before, asked = None, torch.zeros(0, dtype=torch.int64)
    for number, (keys, counted) in enumerate(stream):
        decided, same = pair.decide(keys, counted)
        held["decisions"] &= same
        asked = torch.cat([asked, keys]).unique()
        if number % 4 == 3:
            held["undone"] &= pair.undo(decided) and pair.undo(before)
            held["answers"] &= pair.same_answers(asked)
            held["redone"] &= pair.redo(before) and pair.redo(decided)
        if number == 5:
            held["undone"] &= pair.undo(decided)
            decided, same = pair.decide(keys, counted)
            held["decided again"] &= same
            held["answers"] &= pair.same_answers(asked)
        before, figures = decided, decided[0].figures
        totals += [figures.inserted, figures.evicted, figures.swept, figures.turned_away]
    names = ("inserted", "evicted", "swept", "turned_away")
    held["buckets"] = has_sound_buckets(pair.device)
    return held | dict(zip(names, totals.tolist(), strict=True))


def neighbours(device="cpu"):
    """Of two rows that differ by 1 in their ids alone, the first goes: the bound is an id."""
    ids = torch.arange(1 << 16)
    shards = (compute_keys(ids) >> 52) + SHARDS // 2
    first = int((shards[1:] == shards[:-1]).nonzero()[0])
    shard = int(shards[first])
    batches = [[first, first + 1], [], [], [id_in(shard, 0)], [id_in(shard, 1)]]
    stream = [(compute_keys(torch.tensor(each, dtype=torch.int64)), None) for each in batches]
    return compare(FineDynamic(2 * SHARDS), (shard, shard + 1), stream, device)


def small(device="cpu"):
    """A table of few shards: the shard is in fewer bits of the hash than in a large one."""
    rules, generator, shards = Dynamic(1), np.random.default_rng(5), (29, 31)
    keys = compute_keys(torch.from_numpy(generator.integers(-(2**63), 2**63, 16_000)))
    number = (keys >> rules.shard_bits) + rules.shards // 2
    keys = keys[(number >= shards[0]) & (number < shards[1])]
    stream = [(part.repeat(2), None) for part in keys[:64].split(16)]
    return compare(rules, shards, [*stream, *stream[:2]], device)


def sparse(device="cpu"):
    """Of many shards few want anything, or none; in others all ids are turned away."""
    shards = (100, 170)  # of one row each
    some = [id_in(shard, 0) for shard in range(*shards, 7)]
    others = [id_in(shard, 1) for shard in range(*shards, 3)]
    away = [id_in(shard, number) for shard in (100, 107, 163) for number in (2, 3, 4)]
    batches = [some, some, [], others, some + away, [], others, others]
    stream = [(compute_keys(torch.tensor(each, dtype=torch.int64)), None) for each in batches]
    stream[3] = (stream[3][0], torch.zeros(len(others), dtype=torch.uint8))  # negatives alone
    return compare(FineDynamic(1), shards, stream, device)


def kept(device="cpu"):
    """What a batch keeps, for itself and to be taken back, keeps none of the memory that it was
    decided with: 24 bytes for each of its ids, and as many for those that could have come."""
    pair = Pair(FineDynamic(9 * SHARDS), (4094, 4096), device)
    held = {}
    for number, (keys, _) in enumerate(draw_stream((4094, 4096), 20, 3, 96)):
        decided = pair.device.decide(keys.to(device))
        memory = [each.untyped_storage() for each in [decided.entries, *decided.changes.tensors]]
        nbytes = {each.data_ptr(): each.nbytes() for each in memory}
        held[f"batch {number}"] = sum(nbytes.values()) == 48 * len(keys)
    return held


def zeros_again(device="cpu"):
    """Words that were 0 for two batches are so again for the third."""
    before, id_map_memory.ZEROS = id_map_memory.ZEROS, 2
    try:
        shards = (4094, 4096)
        return compare(FineDynamic(9 * SHARDS), shards, draw_stream(shards, 20, 7, 30), device)
    finally:
        id_map_memory.ZEROS = before


def placed(device="cpu", maps=24):
    """Missing ids get the entries that the plain twin gives them, in maps full of ties, of ids side
    by side, of such as differ in the lower or upper half alone, and of the first and last id."""
    generator, held = torch.Generator().manual_seed(0), {}

    def draw(*bounds):
        return int(torch.randint(*bounds, (), generator=generator))

    for number in range(maps):
        shards, rows = draw(1, 3), draw(1, 26)
        size, where = shards * rows, torch.device(device)
        plain = id_map.allocate(shards, rows, 0, where, 52)
        apart = (1, 3, 1 << 31, (1 << 55) + 5)[number % 4]
        ids = (torch.randperm(4 * size, generator=generator)[:size] - 2 * size) * apart
        plain.ids.copy_(ids)
        plain.ids[0], plain.ids[-1] = SPECIAL[4], SPECIAL[3]
        plain.last.copy_(torch.randint(-1, draw(1, 12), (size,), generator=generator))
        plain.count.copy_(torch.randint(1, draw(2, 6), (size,), generator=generator))
        wanted = torch.randint(0, rows + 3, (shards,), generator=generator).int()
        starts = wanted.cumsum(0) - wanted
        new = torch.arange(int(wanted.sum())) + 10**15
        missing = id_map.Missing(*(value.to(where) for value in (new, wanted, starts)))
        order = {"by_count": number % 3 == 0, "evicts": number % 6 != 5}
        order |= {"batch": 20, "limit": draw(1, 13)}
        found = []
        for module in (id_map, triton_id_map):
            contents, _, sums = module.place(plain, missing, **order)
            count = int(sums[0])
            ids = contents.ids[:count].tolist()
            pairs = sorted(zip(contents.entries[:count].tolist(), ids))
            found.append((pairs, sums.tolist()))
        held[f"map {number}"] = found[0] == found[1]
    return held


def has_sound_buckets(directory) -> bool:
    """Every id is in one bucket, at its bit, and counted by those that it went past; nothing else
    is."""
    held = directory.map
    if not held.words.numel():
        return True
    words, buckets = held.words.cpu().numpy(), held.words.shape[1]
    ids, last = held.ids.cpu(), held.last.cpu().tolist()
    homes = (((mix(ids) >> 20) & 0xFFFFFFFF) * buckets >> 32).tolist()
    passed = np.zeros(words.shape[:2], np.int64)
    bits, found = np.zeros_like(passed), []
    for shard, bucket, place in zip(*words[:, :, :7].nonzero()):
        row = int(words[shard, bucket, place]) & ((1 << held.rows.bit_length()) - 1)
        entry = int(shard) * held.rows + row - 1
        found.append(entry)
        bits[shard, bucket] |= 1 << int(place)
        for step in range((int(bucket) - homes[entry]) % buckets):
            passed[shard, (homes[entry] + step) % buckets] += 1
    used = [entry for entry, use in enumerate(last) if use >= 0]
    return sorted(found) == used and np.array_equal(words[:, :, 7], 256 * passed + bits)


def rebuilt(device="cpu"):
    """Ids that were written are found; those that come later are decided on as before."""
    rules, shards = FineDynamic(9 * SHARDS), (4094, 4096)
    first, second = (Pair(rules, shards, device) for _ in range(2))
    stream = list(draw_stream(shards, 20, 6, 20))
    for keys, counted in stream[:4]:
        first.decide(keys, counted)
    for part in ("host", "device"):
        ours, theirs = getattr(second, part), getattr(first, part)
        for name, value in theirs.get_tensors().items():
            ours.get_tensors()[name].copy_(value)
        ours.batches = theirs.batches
        ours.rebuild()
    held = {"state": second.same_state()}
    for keys, counted in stream[4:]:
        held["decisions"] = second.decide(keys, counted)[1] and held.get("decisions", True)
        held["answers"] = second.same_answers(keys)
    return held | {"buckets": has_sound_buckets(second.device)}


def crowded(device="cpu"):
    """Ids that all begin at the same bucket: buckets run over, into others and round the end."""
    rules = FineDynamic(40 * SHARDS)
    ids = [id_in(9, n) for n in range(3000)]
    hashes = (compute_keys(torch.tensor(ids)) ^ -(1 << 63)) & ((1 << 52) - 1)
    last = ((hashes >> 20) * 10) >> 32 == 9  # of 10 buckets
    keys = compute_keys(torch.tensor(ids)[last])
    assert len(keys) > 110
    stream = [(keys[at : at + 24], None) for at in range(0, 84, 12)]
    return compare(rules, (9, 10), stream, device)


def alike(device="cpu"):
    """Ids that begin at the same bucket and agree in all bits of their hash that a word holds: each
    is told from the others by the id of its entry alone."""
    hashes = (9 << 52) + (torch.arange(110) << 20) + 5
    stream = [(hashes[at : at + 24] ^ -(1 << 63), None) for at in range(0, 84, 12)]
    return compare(FineDynamic(40 * SHARDS), (9, 10), stream, device)


def exchanged(device="cpu"):
    """Rows that come and go, beside plain torch: initial ones, zeros, and those that were there."""
    held = {}
    ids = torch.cat([torch.tensor(SPECIAL), torch.arange(-20, 50)]).to(device)
    slots = (torch.arange(ids.numel(), device=device) * 7 + 3) % 101  # each once
    for width in (1, 12, 128):
        spec = TableSpec("item", 1, width, torch.float32, ())
        seed = derive(7, hash_name("item")).view(1).to(device)
        first = torch.arange(101.0 * width, device=device).view(101, width)
        table = first.clone()
        state = torch.arange(101.0, device=device)
        kept, zeroed = row_exchange.insert_drawn(table, slots, ids, seed, 0.3, state=state)
        drawn = table[slots]
        error = (drawn - draw_initial_rows(spec, ids, 7, 0.3)).abs().max()
        same = torch.equal(kept, first[slots]) and torch.equal(zeroed, slots.float())
        same &= not state[slots].any() and bool(state.sum() == 5050 - slots.sum())
        row_exchange.swap_rows(table, slots, kept)
        same &= torch.equal(table, first) and torch.equal(kept, drawn)
        # of the first 9, whatever there is room for; of the first 5, whatever comes
        for room, total in ((9, slots[:1] * 0 + 60), (60, slots[:1] * 0 + 9), (5, None)):
            table = first.clone()
            kept, _ = row_exchange.insert_drawn(
                table, slots, ids, seed, 0.3, room=room, total=total
            )
            count = min(room, 9)
            expected = first.clone().index_copy_(0, slots[:count], drawn[:count])
            same &= torch.equal(table, expected) and kept.shape[0] == room
            same &= torch.equal(kept[:count], first[slots[:count]])
        held[f"width {width}"] = float(error) < 2e-6 and same
    for shape in ((), (2,)):
        first = torch.rand(101, *shape, device=device) + 1
        table = first.clone()
        kept = row_exchange.insert_zeros(table, slots)
        others = torch.ones(101, dtype=torch.bool, device=device).index_fill_(0, slots, False)
        same = torch.equal(kept, first[slots]) and not table[slots].any()
        held[f"state {shape}"] = same and torch.equal(table[others], first[others])
    return held


def read(device="cpu"):
    """Rows of ids that are there, of others and of crowded buckets, in one pass."""
    rules, shards, width = FineDynamic(9 * SHARDS), (4094, 4096), 12
    pair = Pair(rules, shards, device)
    weight = torch.rand(rules.rows + 1, width).to(device)
    held = {"rows": True}
    for keys, counted in draw_stream(shards, 20, 4, 20):
        pair.decide(keys, counted)
        rows = triton_id_map.read_rows(pair.device.map, keys.to(device), weight, rules.rows)
        slots = pair.host.find(keys, absent=rules.rows).to(device)
        held["rows"] &= torch.equal(rows, weight[slots]) and bool((slots < rules.rows).any())
    return held


def drawn(device="cpu"):
    """Sums of draws, added, taken back and read, beside the plain twin's."""
    generator = torch.Generator().manual_seed(2)
    shards = torch.randint(5, 8, (700,), generator=generator)
    bits = torch.randint(0, 1 << 52, (700,), generator=generator)
    keys = ((shards - SHARDS // 2) << 52) | bits
    held = {"sums": True, "logarithms": True}
    for buckets in (1, 3, 64):
        sums = torch.randint(0, 5, (3, 2 * buckets), generator=generator)
        there = sums.to(device)
        for number, back in enumerate((False, False, True)):
            mine = keys[number * 100 : 500 + number * 100]
            worth = torch.randint(0, 3, mine.shape, generator=generator) << 18
            draws.add_draws(sums, mine, worth, 5 - SHARDS // 2, take_back=back)
            triton_id_map.add_draws(
                there, mine.to(device), worth.to(device), 5 - SHARDS // 2, take_back=back
            )
            held["sums"] &= torch.equal(there.cpu(), sums)
        expected = draws.estimate_log(sums, keys, 5 - SHARDS // 2)
        found = triton_id_map.estimate_log(there, keys.to(device), 5 - SHARDS // 2).cpu()
        held["logarithms"] &= torch.allclose(found, expected, rtol=2e-7, atol=0)
    return held


STREAMS = {
    "lru": (FineDynamic(40 * SHARDS), (8, 10), (60, 8, 60)),
    "lfu": (FineDynamic(20 * SHARDS, evict="lfu"), (8, 10), (40, 8, 30)),
    "one row a shard": (FineDynamic(1), (4094, 4096), (4, 8, 3)),
    "seen": (FineDynamic(5 * SHARDS, Seen(2, room=5 * SHARDS), "lfu"), (8, 10), (20, 8, 24)),
    "after": (FineDynamic(6 * SHARDS, Seen(1), After(3)), (4, 8), (8, 8, 24)),
}
CASES = {
    **{
        name: lambda device, r=rules, s=shards, d=drawn: compare(r, s, draw_stream(s, *d), device)
        for name, (rules, shards, drawn) in STREAMS.items()
    },
    "crowded": crowded,
    "alike": alike,
    "small": small,
    "neighbours": neighbours,
    "sparse": sparse,
    "kept": kept,
    "rebuilt": rebuilt,
    "exchanged": exchanged,
    "placed": placed,
    "zeros again": zeros_again,
    "read": read,
    "drawn": drawn,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # several blocks of a shard: the interpreter is slow
    triton_id_map.SHARD_BLOCK, triton_id_map.ORDER_BLOCK, triton_id_map.BLOCK = 16, 4, 32
    triton_id_map.HELD_ROWS, triton_id_map.HELD_ROWS_OF_WARP, triton_id_map.SCAN_BLOCK = 8, 4, 4
    with by_kernels(triton_id_map):
        print(json.dumps({name: case("cpu") for name, case in CASES.items()}))
