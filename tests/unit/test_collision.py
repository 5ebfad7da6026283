"""Collisions at an owner against Python sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding import collision
from freescale.embedding.collision import (
    MarkedRows,
    collision_masks,
    count_pieces,
    divide_rows,
    is_few,
)
from freescale.kernels.requests.reference import find_first_tags, tag_rows

rows = st.lists(st.integers(0, 12), max_size=20)


@settings(deadline=None, max_examples=200)
@given(rows, rows)
def test_masks(current, following):
    shared, colliding = collision_masks(
        torch.tensor(current, dtype=torch.int64), torch.tensor(following, dtype=torch.int64)
    )
    assert shared.tolist() == [row in set(following) for row in current]
    assert colliding.tolist() == [row in set(current) for row in following]


requests = st.lists(
    st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=6), min_size=1, max_size=5
)


several = st.lists(st.tuples(requests, st.sampled_from([1, 2, 8])), min_size=1, max_size=4)


def ask(several):
    asked = []
    for ranks, pieces in several:
        flat = [one for rank in ranks for one in rank]
        rows = torch.tensor([row for row, _ in flat], dtype=torch.int64)
        marked = torch.tensor([mark for _, mark in flat], dtype=torch.bool)
        asked.append(MarkedRows(marked, rows, [len(rank) for rank in ranks], pieces))
    return asked


WAYS = {"c": divide_rows, "sort": collision._divide_by_one_sort}


@settings(deadline=None)
@given(several, st.sampled_from(sorted(WAYS)))
def test_requests_are_divided_into_the_marked_and_pieces_of_the_others(several, way):
    asked = ask(several)
    orders, counts = WAYS[way](asked)
    counts = counts.split([each.bins for each in asked])
    for (ranks, pieces), order, count in zip(several, orders, counts, strict=True):
        assert [positions.tolist() for positions in order.split(count.tolist())] == expected(
            ranks, pieces
        )
        assert order.dtype == torch.int32 or way == "sort", "half the memory"


@pytest.mark.parametrize("way", sorted(WAYS))
def test_more_pieces_of_ranks_than_16_bits_hold(way):
    ranks, pieces, rows = 2000, 64, [3, 70, 5, 3, 6]
    sizes = [0] * ranks
    sizes[1], sizes[1234], sizes[-1] = 2, 1, 2
    marked = torch.tensor([False, False, False, False, True])
    (order,), counts = WAYS[way]([MarkedRows(marked, torch.tensor(rows), sizes, pieces)])
    # the marked one of the last rank, then by piece (row modulo 64) and rank
    assert order.tolist() == [4, 0, 3, 2, 1]
    bins = [(0, 1999), (4, 1), (4, 1999), (6, 1234), (7, 1)]
    assert counts.nonzero().view(-1).tolist() == [piece * ranks + rank for piece, rank in bins]


@settings(deadline=None)
@given(several)
def test_tags_divide_in_the_same_way(several):
    """What a GPU sorts by."""
    asked = ask(several)
    tags = tag_rows(asked).split([one.rows.numel() for one in asked])
    for (ranks, pieces), one, first, own in zip(several, asked, find_first_tags(asked), tags):
        bins = range(first, first + one.bins)
        found = [(own == bin).nonzero().view(-1).tolist() for bin in bins]
        assert found == expected(ranks, pieces)


def expected(ranks, pieces):
    flat = [(row, mark, rank) for rank, asked in enumerate(ranks) for row, mark in asked]
    found = []
    for piece in range(1 + pieces):
        for rank in range(len(ranks)):
            found.append([])
            for position, (row, mark, of) in enumerate(flat):
                if of == rank and (piece == 0 if mark else piece == row % pieces + 1):
                    found[-1].append(position)
    return found


def test_pieces_are_not_too_small():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [count_pieces(size << 20, cpu) for size in (0, 1, 3, 8, 9999)] == [1, 1, 2, 8, 64]
    assert [count_pieces(size << 20, cuda) for size in (0, 8, 63, 64, 9999)] == [1, 1, 4, 8, 64]
    assert [count_pieces(512 << 20, cuda, ranks) for ranks in (8, 512, 1024, 4096, 1 << 20)] == [
        64,
        64,
        32,
        8,
        1,
    ]


def test_few_rows_wait_for_the_update():
    """Less than a piece, on a CPU, within a machine."""
    cpu, least = torch.device("cpu"), 1 << 20
    assert is_few(least - 1, cpu, nearby=True) and not is_few(least, cpu, nearby=True)
    assert not is_few(0, cpu, nearby=False) and not is_few(0, torch.device("cuda"), nearby=True)


def test_the_size_of_the_table_does_not_matter():
    """Rows near 2^60: anything that allocates by row would fail."""
    far = 1 << 60
    shared, colliding = collision_masks(torch.tensor([3, far, far]), torch.tensor([far, 5]))
    assert shared.tolist() == [False, True, True] and colliding.tolist() == [True, False]
