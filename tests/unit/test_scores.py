"""Tiles of scores against all scores at once."""

from __future__ import annotations

import pytest
import torch

from freescale.batch import Jagged
from freescale.kernels.softmax.scores import (
    choose_tile,
    count_better,
    score_targets,
    split_queries,
)

TILE = 8


def count(scores, places, goals=None):
    """Queries and items whose products are these scores: [q, n]."""
    scores = torch.tensor(scores)
    goals = scores.gather(1, places.clamp(min=0)[:, None])[:, 0] if goals is None else goals
    # a query's row picks its own column of the items; a product with zeros would spoil what is no
    # number, so each query is counted alone
    return [
        int(count_better(torch.ones(1, 1), row[:, None], place[None], goal[None], tile=TILE)[0])
        for row, place, goal in zip(scores, places, goals, strict=True)
    ]


def test_the_target_is_last_among_equal_scores_and_not_counted_itself():
    scores = [[1.0, 1.0, 2.0, 1.0, 0.0], [3.0, 1.0, 2.0, 1.0, 0.0]]
    assert count(scores, torch.tensor([0, 0])) == [3, 0]
    equal = [[0.0] * 50]
    for target in (0, 9, 49):  # a model that has collapsed, wherever the target is
        assert count(equal, torch.tensor([target])) == [49]
    assert count(equal, torch.tensor([-1]), torch.zeros(1)) == [50]  # it is elsewhere


def test_scores_that_are_no_number_never_flatter():
    nan, inf = float("nan"), float("inf")
    scores = [[nan, nan, nan], [nan, 1.0, 2.0], [1.0, nan, 0.0], [inf, inf, 0.0]]
    # a target of no number is last of all
    assert count(scores, torch.zeros(4, dtype=torch.int64)) == [2, 2, 1, 1]


@pytest.mark.parametrize("tile", [8, 20, 64])
@pytest.mark.parametrize("items", [0, 1, 8, 21, 64])
def test_tiles_equal_all_at_once(items, tile):
    generator = torch.Generator().manual_seed(items)
    queries = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    table = torch.randn(max(1, items // 2), 5, generator=generator, dtype=torch.float64)
    rows = table[torch.arange(items) % len(table)]  # each twice: ties
    places = torch.randint(-1, items, (7,), generator=generator)
    lengths = torch.tensor([2, 0, 3, 1, 0, 2, 4])
    out = Jagged(torch.randint(-1, items, (12,), generator=generator), lengths)
    scores = queries @ rows.T
    goals = score_targets(queries, rows, places, tile=tile)
    for i, place in enumerate(places.tolist()):
        assert goals[i] == pytest.approx(0.0 if place < 0 else float(scores[i, place]))
    near = scores >= goals[:, None] - 1e-12
    owner = torch.repeat_interleave(torch.arange(7), lengths)
    history = torch.full((7, 4), -1)  # different items, without the target
    for i in range(7):
        of = {p for p in out.values[owner == i].tolist() if p >= 0} - {int(places[i])}
        history[i, : len(of)] = torch.tensor(sorted(of))
    for seen in (None, history):
        better, of_seen = count_better(queries, rows, places, goals, tile=tile, seen=seen)
        for i, place in enumerate(places.tolist()):
            ahead = {item for item in range(items) if near[i, item]} - {place}
            assert int(better[i]) == len(ahead)
            assert int(of_seen[i]) == len(ahead & set([] if seen is None else seen[i].tolist()))


def test_equal_rows_score_alike_in_every_tile_and_part():
    """The target's own score too, whose product is another one."""
    torch.manual_seed(0)
    queries, row = torch.randn(33, 50), torch.randn(1, 50)
    rows = row.expand(3 * TILE * 8 + 5, 50).contiguous()
    tile = TILE * 8
    for part in (rows, rows[:7]):
        places = torch.arange(33) % 7
        goals = score_targets(queries, part, places, tile=tile)
        better, _ = count_better(queries, part, places, goals, tile=tile)
        assert better.tolist() == [len(part) - 1] * 33


def test_sizes():
    assert choose_tile(37) == 1024 and choose_tile(5000) == 5056 and choose_tile(10**6) == 1 << 14
    parts = list(split_queries(torch.zeros(150, 3), torch.arange(150)))
    assert [len(q) for q, _ in parts] == [64, 64, 22]
    assert torch.equal(torch.cat([p for _, p in parts]), torch.arange(150))
