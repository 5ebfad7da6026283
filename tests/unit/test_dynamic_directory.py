"""Which ids of a dynamic table get a row: every decision of generated streams is that of a plain
Python oracle, for every number of owners, and can be undone and made again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.dynamic_oracle import FineDynamic, Oracle, shard_of
from helpers.dynamic_streams import SPECIAL, id_in
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data import hash_ids
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic_rules import (
    ENTRY_BYTES,
    LFU,
    SHARDS,
    After,
    Dynamic,
    Seen,
    parse_count,
    parse_dynamic,
)
from freescale.embedding.layout import DynamicLayout, TableSpec, compute_keys

POOL = [id_in(shard, number) for shard in (0, 1, 1365, 4095) for number in range(12)] + SPECIAL
SWEPT = [id_in(shard, number) for shard in range(12) for number in range(3)]  # by early batches


def make_layout(rules, world):
    return DynamicLayout(
        (TableSpec("item", rules.rows, 4, torch.float32, ("f",), None, rules),), world
    )


def keys_of(ids):
    return compute_keys(torch.tensor(sorted(ids), dtype=torch.int64)).sort().values.numpy()


class Owners:
    """A directory for each rank."""

    def __init__(self, rules, world):
        self.layout = make_layout(rules, world)
        shards = [self.layout.get_owned_shards(rank) for rank in range(world)]
        self.parts = [Directory(rules, *part) for part in shards]

    def plan(self, ids, negatives=frozenset(), at_once=frozenset()):
        """(position of each id, changes of each owner)."""
        keys, found, changes = keys_of(ids), {}, []
        names = {
            int(key): id for id, key in zip(ids, compute_keys(torch.tensor(list(ids))).tolist())
        }
        owners = np.searchsorted(self.layout.list_edges("cpu").numpy(), keys, side="right")
        owners = np.minimum(owners, len(self.parts) - 1)
        for rank, part in enumerate(self.parts):
            mine = keys[owners == rank]
            counted = [
                2 if names[int(key)] in at_once else names[int(key)] not in negatives
                for key in mine
            ]
            marked = bool(negatives or at_once)
            made = part.plan(mine, np.array(counted, np.uint8) if marked else None)
            first = self.layout.get_owned_range(0, rank)[0]
            places = np.where(made.found < 0, -1, made.found + first)
            found |= {names[int(key)]: int(at) for key, at in zip(mine, places)}
            assert np.array_equal(part.find(torch.from_numpy(mine)), made.found)
            changes.append(made)
        return found, changes

    def state(self):
        rows = self.layout.rules.shard_rows
        return [
            ((at + self.layout.get_owned_range(0, rank)[0]) // rows, at % rows, *entry)
            for rank, part in enumerate(self.parts)
            for at, entry in list_entries(part.rows)
        ]

    def counted(self):
        rows = self.layout.rules.shard_counters
        return sorted(
            (at // rows + self.layout.get_owned_shards(rank)[0], *entry)
            for rank, part in enumerate(self.parts)
            if part.counters is not None
            for at, entry in list_entries(part.counters)
        )

    def arrays(self):
        tables = [t for part in self.parts for t in (part.rows, part.counters) if t is not None]
        return [array.copy() for t in tables for array in (t.ids, t.last, t.count)]


def list_entries(table):
    used = (table.last >= 0).nonzero()[0]
    three = (table.ids[used], table.last[used], table.count[used])
    return zip(used.tolist(), zip(*(array.tolist() for array in three)))


def add_figures(changes):
    every = [vars(made.figures) for made in changes]
    return {name: sum(each[name] for each in every) for name in every[0]}


RULES = st.builds(
    FineDynamic,
    capacity=st.sampled_from([1, 3 * SHARDS, 5 * SHARDS]),
    admit=st.builds(Seen, st.integers(1, 3), st.sampled_from([None, SHARDS, 2 * SHARDS])),
    evict=st.one_of(
        st.sampled_from(["lru", "lfu"]),
        st.builds(After, st.integers(3, 6)),
        st.builds(LFU, st.integers(1, 5)),
    ),
)
BATCH = st.sets(st.sampled_from(POOL + SWEPT), max_size=30)
STREAMS = st.lists(st.tuples(BATCH, BATCH), min_size=1, max_size=14)


@given(
    rules=RULES,
    stream=STREAMS,
    world=st.integers(1, 5),
    undone=st.integers(0, 2),
    first=st.sampled_from([set(), {POOL[5], POOL[17]}]),
)
@settings(max_examples=40, deadline=None)
def test_every_decision_is_the_oracles(rules, stream, world, undone, first):
    """`first`: ids that need no admission."""
    oracle, owners = Oracle(rules), Owners(rules, world)
    for ids, others in stream:
        at_once = first & ids
        negatives = (others & ids) - at_once
        before = owners.arrays()
        expected = oracle.plan(ids, negatives, at_once)
        found, changes = owners.plan(ids, negatives, at_once)
        for _ in range(undone):
            after = owners.arrays()
            for part, made in zip(owners.parts, changes):
                part.undo(made)
            assert all(map(np.array_equal, owners.arrays(), before))
            for part, made in zip(owners.parts, changes):
                part.redo(made)
            assert all(map(np.array_equal, owners.arrays(), after))
        if undone == 2:  # dropped, and decided again
            for part, made in zip(owners.parts, changes):
                part.undo(made)
            found, changes = owners.plan(ids, negatives, at_once)
        assert found == expected
        assert add_figures(changes) == oracle.figures
        assert sorted(owners.state()) == oracle.state()
        assert owners.counted() == oracle.counted()


def test_what_follows_from_the_saved_arrays_is_rebuilt():
    rules = FineDynamic(3 * SHARDS, Seen(2), "lru")
    first, second = Owners(rules, 1), Owners(rules, 1)
    stream = [set(POOL[i::3]) | set(POOL[i : i + 20]) for i in range(9)]
    for ids in stream[:6]:
        first.plan(ids)
    for ours, theirs in zip(
        (second.parts[0].rows, second.parts[0].counters),
        (first.parts[0].rows, first.parts[0].counters),
    ):
        for name in ("ids", "last", "count"):
            getattr(ours, name)[:] = getattr(theirs, name)
    second.parts[0].batches = 6
    second.parts[0].rebuild()
    for ids in stream[6:]:
        assert second.plan(ids)[0] == first.plan(ids)[0]
    assert second.state() == first.state()


def test_many_ids_in_large_shards_are_the_oracles():
    """Queues are consumed and filled again, and a shard's whole map is turned over."""
    generator = np.random.default_rng(0)
    for evict in ("lru", "lfu", LFU(7)):
        rules = FineDynamic(40 * SHARDS, Seen(1), evict)
        oracle, owners = Oracle(rules), Owners(rules, 1)
        pool = np.array([id_in(7, number) for number in range(400)])
        for _ in range(60):
            ids = set(generator.choice(pool, 12).tolist())
            owners.parts[0].undo(owners.plan(ids)[1][0])  # dropped, and decided again
            assert owners.plan(ids)[0] == oracle.plan(ids)
        assert sorted(owners.state()) == oracle.state()


@pytest.mark.parametrize("evict", ["lru", "lfu", LFU(7), After(3)], ids=str)
def test_small_tables_have_few_shards_on_any_number_of_ranks(evict):
    """Of 40 ranks, 8 own nothing."""
    rules, generator = Dynamic(1, Seen(2, room=1), evict), np.random.default_rng(0)
    assert rules.shards == 32 and rules.shard_rows == rules.shard_counters == 128
    pool = np.array([id for id in range(-4000, 4000) if shard_of(id, 32) in (0, 12, 31)])
    oracle, owners = Oracle(rules), [Owners(rules, world) for world in (1, 3, 40)]
    totals = dict.fromkeys(oracle.figures, 0)
    for number in range(14):
        ids = set(generator.choice(pool[number * 30 :], 200).tolist())
        expected = oracle.plan(ids)
        for each in owners:
            found, changes = each.plan(ids)
            assert found == expected and add_figures(changes) == oracle.figures
        totals = {name: totals[name] + count for name, count in oracle.figures.items()}
    for each in owners:
        assert sorted(each.state()) == oracle.state() and each.counted() == oracle.counted()
    wanted = {"inserted", "waiting", "swept" if isinstance(evict, After) else "evicted"}
    assert all(totals[name] > 20 for name in wanted), totals


def test_rows_that_were_popular_long_ago_make_room():
    """With counts that are halved; without, they stay."""
    old, new, last = (id_in(5, number) for number in range(3))
    for evict, kept in (("lfu", old), (LFU(16), new)):
        owners = Owners(FineDynamic(2 * SHARDS, evict=evict), 1)
        for ids in [{old}] * 40 + [{new}] * 20 + [{last + 1}] * 3 + [{last}]:
            owners.plan(ids)
        assert {entry[2] for entry in owners.state() if entry[0] == 5} == {kept, last}


def test_all_new_all_turned_away_and_one_row_a_shard():
    rules = FineDynamic(1)  # one row in each shard
    owners = Owners(rules, 1)
    assert rules.rows == SHARDS
    first, second = ({id_in(s, n) for s in range(SHARDS)} for n in (0, 1))
    assert (made := owners.plan(first)[1][0].figures).inserted == SHARDS and not made.evicted
    for _ in range(2):  # the rows of the last batches stay
        assert owners.plan(second)[1][0].figures.turned_away == SHARDS
    assert owners.plan(second)[1][0].figures.evicted == SHARDS
    assert {entry[2] for entry in owners.state()} == second


PATTERNS = {
    "consecutive": lambda n: torch.arange(n),
    "strided": lambda n: torch.arange(n) * 4096 - (1 << 40),
    "hashed": lambda n: torch.from_numpy(np.random.default_rng(n).integers(-(2**63), 2**63, n)),
    "strings": lambda n: hash_ids([f"sku-{number}" for number in range(n)]),
}


@pytest.mark.parametrize(
    ("rows", "pattern"),
    [
        (rows, pattern)
        for rows in (1000, 1500, 5000, 20_000, 100_000, 1_000_000)
        for pattern in PATTERNS
        if pattern != "strings" or rows <= 20_000  # slow to hash, and like others then
    ],
)
def test_nine_tenths_of_as_many_ids_as_rows_have_one(rows, pattern):
    rules, ids = Dynamic(rows), PATTERNS[pattern](rows)
    directory = Directory(rules, 0, rules.shards)
    keys = compute_keys(ids)
    for batch in keys.chunk(10):
        directory.plan(batch.sort().values.numpy())
    resident = int((directory.find(keys) >= 0).sum())
    assert resident == directory.used >= 0.9 * rows


def test_the_number_of_shards_follows_the_capacity():
    for rows in (1, 4096, 4097, 20_000, 520_192, 520_193, 10**6, 50_000_000):
        rules = Dynamic(rows)
        assert rules.rows == -(-rows // SHARDS) * SHARDS == rules.shards * rules.shard_rows
        assert (rules.shards == SHARDS) == (rows > 520_192)  # as before: the same decisions
        assert 128 <= rules.shard_rows < 256 or rules.shards == SHARDS


def test_memory_beside_the_rows():
    directory = Directory(Dynamic(1000 * SHARDS), 0, SHARDS)
    assert directory.rows.nbytes / (1000 * SHARDS) <= ENTRY_BYTES


def test_keys_are_ids_in_the_order_of_owners():
    ids = torch.tensor(POOL)
    keys = compute_keys(ids)
    assert keys.unique().numel() == ids.unique().numel()
    assert [(key >> 52) + 2048 for key in keys.tolist()] == [shard_of(id) for id in POOL]
    for world in (1, 2, 3, 4, 5000):
        layout = make_layout(Dynamic(1), world)
        parts = [layout.get_owned_range(0, rank) for rank in range(world)]
        assert parts[0][0] == 0 and parts[-1][1] == layout.rules.rows
        assert all(a[1] == b[0] for a, b in zip(parts[:-1], parts[1:]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dynamic:50M", Dynamic(50_000_000)),
        ("dynamic:8192:seen=3:lfu", Dynamic(8192, Seen(3), "lfu")),
        ("dynamic:1K:lfu=500", Dynamic(1000, Seen(1), LFU(500))),
        ("dynamic:1K:after=100", Dynamic(1000, Seen(1), After(100))),
        ("dynamic:1.5m:lru:map=host", Dynamic(1_500_000, map="host")),
        ("dynamic:2G:seen=2:default=learned", Dynamic(2 * 10**9, Seen(2), default="learned")),
        ("dynamic:3b:default=zeros:map=auto", Dynamic(3 * 10**9)),
        ("host:8GB", None),
    ],
)
def test_text_for_the_command_line(text, expected):
    found = parse_dynamic(text)
    if expected is None:
        assert found is None
    else:
        assert parse_count(found.capacity) == expected.capacity
        assert replace(found, capacity=expected.capacity) == expected


def test_sizes_are_those_of_whole_shards():
    large = 128 * SHARDS + 1
    rules = Dynamic(large, Seen(2, room=129 * SHARDS + 1))
    assert (rules.shard_rows, rules.rows, rules.shard_counters) == (129, 129 * SHARDS, 130)
    assert rules.map_bytes == 129 * SHARDS * ENTRY_BYTES
    assert rules.counter_bytes == 130 * SHARDS * ENTRY_BYTES
    assert Dynamic(large, Seen(2)).shard_counters == 129  # as many as rows
    assert Dynamic(large, Seen(1, room=1)).shard_counters == 0  # every id is admitted
    assert Dynamic(SHARDS).rows == SHARDS


def test_checkpoints_tell_tables_apart_that_do_not_hold_the_same():
    kinds = [
        Dynamic(9),
        Dynamic(9, Seen(2)),
        Dynamic(9, Seen(2, room=2 * SHARDS)),
        Dynamic(9, draws="targets"),
        Dynamic(9, default="learned"),
        Dynamic(9, draws="targets", default="learned"),
    ]
    assert len({str(rules.describe()) for rules in kinds}) == len(kinds)
    assert kinds[0].describe() == ["dynamic", 0]  # as existing checkpoints have it
    assert kinds[-1].describe() == ["dynamic", 0, "draws", "learned"]
    same = Dynamic(5 * SHARDS, evict=LFU(9), negatives=(), map="host")
    assert same.describe() == kinds[0].describe()


def test_which_maps_are_on_the_device():
    assert Dynamic(1).maps_on_device and Dynamic(1, map="device").maps_on_device
    for others in ({"map": "host"}, {"evict": LFU(9)}, {"default": "learned"}):
        assert not Dynamic(1, **others).maps_on_device


def test_words_for_the_user():
    assert str(Dynamic(1)) == "dynamic, admits every id, evicts the row used longest ago"
    rules = Dynamic(1, Seen(2), LFU(5000), default="learned", map="host")
    assert str(rules) == (
        "dynamic, admits after 2 batches, evicts the row used least often, counts halved every "
        "5,000 batches, others read a learned row, map on the host"
    )
    assert "removes rows unused for 3 steps" in str(Dynamic(1, evict=After(3)))


WRONG = ["seen=x", "lfu=x", "lru=3", "after=", "default=mean", "x=learned", "map=", "x=host"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dynamic(0), "needs room"),
        (lambda: Dynamic("many"), "not a number of rows"),
        (lambda: Dynamic(1, evict="fifo"), "'lru', 'lfu'"),
        (lambda: Dynamic(1, admit=3), "freescale.Seen"),
        (lambda: Seen(0), "from 1 on"),
        (lambda: After(2), "at least 3"),
        (lambda: Seen(2, room=0), "room of Seen must be at least 1"),
        (lambda: LFU(0), "evict='lfu'"),
        (lambda: Dynamic(1, evict=LFU(1), map="device"), "take map='host'"),
        (lambda: parse_dynamic("dynamic:"), "dynamic:50M"),
        (lambda: parse_dynamic("dynamic:1M:fifo"), "seen=N"),
        *(
            (lambda option=option: parse_dynamic(f"dynamic:1M:{option}"), f"'{option}' in")
            for option in WRONG
        ),
    ],
)
def test_mistakes_name_the_fix(make, message):
    with pytest.raises(ValueError, match=message):
        make()
