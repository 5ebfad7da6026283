"""The best items over tiles against sorting all scores."""

from __future__ import annotations

import pytest
import torch

from freescale.batch import Jagged
from freescale.kernels import best_items
from freescale.kernels.best_items import find_best


@pytest.fixture(params=["native", "torch"])
def _way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(best_items, "load_native", lambda: None)


def sort_all(scores: torch.Tensor, k: int):
    """Falling; among equal scores the first item is first."""
    order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), order


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("tile", [64, 128, 320])
@pytest.mark.parametrize("items", [0, 1, 64, 65, 1000])
@pytest.mark.parametrize("k", [1, 7, 200])
def test_equals_a_sort_of_all_scores(items, tile, k, monkeypatch):
    monkeypatch.setattr(best_items, "_CPU_PRODUCT", (4, tile))
    generator = torch.Generator().manual_seed(items)
    # whole numbers: sums are exact, and many scores are equal
    queries = torch.randint(-2, 3, (9, 6), generator=generator).float()
    rows = torch.randint(-2, 3, (items, 6), generator=generator).float()
    found, places = find_best(queries, rows, k)
    scores, order = sort_all(queries @ rows.T, k)
    assert torch.equal(found, scores) and torch.equal(places, order)


@pytest.mark.usefixtures("_way")
def test_items_that_are_left_out_come_last(monkeypatch):
    monkeypatch.setattr(best_items, "_CPU_PRODUCT", (2, 64))
    generator = torch.Generator().manual_seed(0)
    queries, rows = torch.randn(5, 8, generator=generator), torch.randn(300, 8, generator=generator)
    lengths = torch.tensor([3, 0, 290, 300, 1])
    places = torch.cat(
        [torch.tensor([5, -1, 299]), torch.arange(290), torch.arange(300), torch.tensor([64])]
    )
    found, best = find_best(queries, rows, 20, left_out=Jagged(places, lengths))
    scores = queries @ rows.T
    for query, out in enumerate(places.split(lengths.tolist())):
        scores[query, out[out >= 0]] = -torch.inf
    expected, order = sort_all(scores, 20)
    torch.testing.assert_close(found, expected)
    there = expected > -torch.inf
    assert torch.equal(best[there], order[there])
    assert there.sum(1).tolist() == [20, 20, 10, 0, 20]


@pytest.mark.usefixtures("_way")
def test_no_number_is_never_among_the_best():
    rows = torch.tensor([[1.0], [float("nan")], [3.0], [-0.0], [0.0]])
    found, places = find_best(torch.ones(1, 1), rows, 4)
    assert found.tolist() == [[3.0, 1.0, 0.0, 0.0]] and places.tolist() == [[2, 0, 3, 4]]
