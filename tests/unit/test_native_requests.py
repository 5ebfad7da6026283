"""Rows of requests in C beside the plain versions: every bit is the same."""

from __future__ import annotations

import pytest
import torch

from freescale.embedding import collision
from freescale.embedding.collision import MarkedRows, divide_rows
from freescale.kernels import native as bindings
from freescale.kernels.dispatch import requests as dispatch
from freescale.kernels.requests import native as requests
from freescale.kernels.requests import reference as unique
from freescale.kernels.rows import reference as rows

# keys [n] below a bound: none, equal ones, many of few, few of many, more than one pass sorts
SIZES = [(0, 5), (1, 1), (3000, 7), (40, 5), (1400, 54_542), (5000, 1 << 40)]


@pytest.fixture(autouse=True)
def needs_c():
    assert bindings.load_native() is not None, bindings.explain_missing_native()


def draw(count: int, bound: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(bound, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("count", "bound"), SIZES)
def test_keys_once_each(count, bound):
    keys, edges = draw(count, bound), torch.tensor([bound // 3, bound // 3, bound + 1])
    for given in (keys, keys.int()) if bound < 1 << 31 else (keys,):
        mine, plain = requests.deduplicate(given, edges), unique.deduplicate(given, edges)
        assert torch.equal(mine.keys, plain.keys) and torch.equal(mine.inverse, plain.inverse)
        assert torch.equal(mine.counts, plain.counts) and mine.counts.sum() == len(mine.keys)


@pytest.mark.parametrize("keys", [[-3, 5, -3], [(1 << 62) + 1, 4, 9, 4]])
def test_keys_that_need_all_bits_take_the_plain_way(keys):
    found = requests.deduplicate(torch.tensor(keys), torch.tensor([(1 << 63) - 1]))
    assert found.keys.tolist() == sorted(set(keys))
    assert found.keys[found.inverse].tolist() == keys


@pytest.mark.parametrize(("count", "bound"), SIZES)
def test_rows_that_two_batches_share(count, bound):
    current, following = draw(count, bound), draw(count // 2 + 1, bound, seed=1)
    for both in ((current, following), (following, current), (current, current[:0])):
        mine, plain = requests.collision_masks(*both), unique.collision_masks(*both)
        assert all(map(torch.equal, mine, plain))


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(("count", "bound"), SIZES)
def test_requests_in_parts(count, bound, pieces, monkeypatch):
    marked = draw(count, 3, seed=2) == 0
    sizes = [count // 3, 0, count - count // 3]
    given = [MarkedRows(marked, draw(count, bound), sizes, pieces) for _ in range(2)]
    mine = divide_rows(given)
    monkeypatch.setattr(collision, "fits_division", lambda rows: False)
    plain = divide_rows(given)
    assert all(torch.equal(a.long(), b) for a, b in zip(mine[0], plain[0], strict=True))
    assert torch.equal(mine[1], plain[1])


@pytest.mark.parametrize(("count", "bound"), SIZES)
def test_sums_of_duplicates(count, bound):
    numbers, gradients = draw(count, bound), torch.randn(count, 13)
    gradients[::3] *= -0.0  # whose sign has to stay
    for mine, plain in zip(
        requests.group_duplicates(numbers)(gradients),
        rows.group_duplicates(numbers)(gradients),
        strict=True,
    ):
        assert torch.equal(mine, plain) and torch.equal(mine.sign(), plain.sign())
        assert torch.equal(mine.signbit(), plain.signbit())


def test_rows_are_put_in_their_places():
    places, values = torch.randperm(50)[:20].int(), torch.randn(20, 7)
    into = [torch.zeros(50, 7) for _ in range(2)]
    dispatch.put_rows(into[0], places, values)
    into[1][places.long()] = values
    assert torch.equal(*into)
    rounded = torch.zeros(50, 7)
    dispatch.put_rows(rounded, places, values.bfloat16())
    assert torch.equal(rounded, into[0].bfloat16().float())
