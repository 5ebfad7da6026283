"""Collisions at an owner against Python sets."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding.collision import collision_masks, counts_per_rank

rows = st.lists(st.integers(0, 12), max_size=20)


@settings(deadline=None, max_examples=200)
@given(rows, rows)
def test_masks(current, coming):
    shared, colliding = collision_masks(torch.tensor(current, dtype=torch.int64), torch.tensor(coming, dtype=torch.int64))
    assert shared.tolist() == [row in set(coming) for row in current]
    assert colliding.tolist() == [row in set(current) for row in coming]


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5))
def test_counts(parts):
    mask = torch.tensor([value for part in parts for value in part], dtype=torch.bool)
    assert counts_per_rank(mask, [len(part) for part in parts]).tolist() == [sum(part) for part in parts]


def test_the_size_of_the_table_does_not_matter():
    """Rows near 2^60: anything that allocates by row would fail."""
    far = 1 << 60
    shared, colliding = collision_masks(torch.tensor([3, far, far]), torch.tensor([far, 5]))
    assert shared.tolist() == [False, True, True] and colliding.tolist() == [True, False]
