"""Where rows live: a bijection, balanced over ranks, the same order for every number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding.layout import ShardLayout, TableSpec, choose_stride, find_ids, spread_ids
from freescale.embedding.placement import BUDGET, Placement, choose_placement, parse_placement


def spec(name: str, rows: int, width: int = 4) -> TableSpec:
    return TableSpec(name, rows, width, torch.float32, (name,))


@settings(deadline=None)
@given(st.integers(1, 3000))
def test_spread_is_a_bijection(rows):
    ids = torch.arange(rows)
    spread = spread_ids(ids, rows)
    assert torch.equal(spread.sort().values, ids)
    assert torch.equal(find_ids(spread, rows), ids)


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31 + 11, 9_000_000_000, 10**12])
def test_large_tables_do_not_overflow(rows):
    ids = torch.tensor([0, 1, 2, rows // 2, rows - 2, rows - 1])
    spread = spread_ids(ids, rows)
    assert spread.tolist() == [i * choose_stride(rows) % rows for i in ids.tolist()]
    assert torch.equal(find_ids(spread, rows), ids)


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 9))
def test_keys_name_each_row_once(sizes, world):
    layout = ShardLayout(tuple(spec(f"t{i}", rows) for i, rows in enumerate(sizes)), world)
    keys = torch.cat([layout.compute_keys(t, torch.arange(rows)) for t, rows in enumerate(sizes)])
    assert keys.unique().numel() == sum(sizes)
    for table, rows in enumerate(sizes):
        position = spread_ids(torch.arange(rows), rows)
        key = layout.compute_keys(table, torch.arange(rows))
        owner, local = key // layout.size, key % layout.size
        for rank in range(world):
            first, last = layout.get_owned_range(table, rank)
            mine = owner == rank
            assert torch.equal(mine, (position >= first) & (position < last))
            assert torch.equal(local[mine], position[mine] - first + layout.base(table))


def test_popular_small_ids_are_spread_over_ranks():
    layout = ShardLayout((spec("item", 100_000),), 8)
    owners = layout.compute_keys(0, torch.arange(800)) // layout.size
    counts = torch.bincount(owners, minlength=8)
    assert counts.min() >= 90 and counts.max() <= 110


def test_placement_rule():
    assert choose_placement(spec("tiny", 100), 4, None).kind == "replicated"
    small = spec("small", 50_000)
    assert choose_placement(small, 4, 0.3 * 50_000).kind == "replicated"
    assert choose_placement(small, 4, 0.2 * 50_000).kind == "sharded"
    assert choose_placement(small, 4, None).kind == "sharded"
    large = spec("large", BUDGET // 16)
    assert choose_placement(large, 4, large.rows).kind == "sharded"


def test_placement_wishes():
    assert parse_placement("auto", ["a", "b"]) == {}
    wished = {name: Placement(name, "as requested") for name in ("sharded", "replicated")}
    assert parse_placement({"a": "sharded"}, ["a", "b"]) == {"a": wished["sharded"]}
    assert parse_placement("replicated", ["a", "b"]) == dict.fromkeys("ab", wished["replicated"])
    with pytest.raises(ValueError, match="table 'c'; the tables are a, b"):
        parse_placement({"c": "sharded"}, ["a", "b"])
    with pytest.raises(ValueError, match="must be auto, sharded, replicated.*, not 'everywhere'"):
        parse_placement({"a": "everywhere"}, ["a", "b"])
