"""Moves of jagged features against loops over samples; the Triton kernel against them, through
Triton's interpreter."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from freescale_bench.kernels import triton_jagged
from freescale_bench.kernels.jagged import (
    move,
    plan_combine,
    plan_dispatch,
    plan_permute,
    plan_transpose,
)
from helpers import interpreter, kernel_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.batch import Jagged


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(kernel_cases.__file__, "jagged")


@pytest.mark.parametrize("case", kernel_cases.JAGGED)
def test_the_kernel_equals_its_twin(interpreted, case):
    assert kernel_cases.holds(interpreted[case]), interpreted[case]


def samples_of(values, lengths):
    return [
        list(value.split(row.tolist())) for value, row in zip(values, torch.from_numpy(lengths))
    ]


tables = st.integers(0, 6).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=3)
)


@settings(deadline=None, max_examples=60)
@given(tables, st.randoms(use_true_random=False))
def test_moves_against_loops(table, random):
    lengths = np.array(table, np.int64).reshape(len(table), -1)
    features, n = lengths.shape
    shapes = [random.choice([(), (3,), (2, 2)]) for _ in range(features)]
    order = np.array(random.sample(range(n), n), np.int64)
    counts = np.bincount([random.randrange(4) for _ in range(n)], minlength=4)
    values = [torch.randn(int(row.sum()), *shape) for row, shape in zip(lengths, shapes)]
    parts = samples_of(values, lengths)  # [features][samples]

    permuted = move(values, plan_permute(lengths, order, shapes))
    for feature, value in enumerate(permuted):
        assert torch.equal(
            value, torch.cat([values[feature][:0], *(parts[feature][i] for i in order)])
        )

    dispatch = plan_dispatch(lengths, order, counts, shapes)
    (message,) = move(values, dispatch)
    ranks = [order[end - count : end] for count, end in zip(counts, np.cumsum(counts))]
    slabs = [
        torch.cat([torch.zeros(0), *(parts[f][i].flatten() for f in range(features) for i in rank)])
        for rank in ranks
    ]
    assert torch.equal(message, torch.cat(slabs)) and dispatch.splits == tuple(
        len(slab) for slab in slabs
    )

    combine = plan_combine(lengths[:, order], counts, shapes)
    assert combine.splits == dispatch.splits
    for value, expected in zip(move([message], combine), permuted, strict=True):
        assert value.shape == expected.shape and torch.equal(value, expected)

    transpose = plan_transpose(lengths, shapes)
    (turned,) = move(values, transpose)
    assert torch.equal(
        turned,
        torch.cat(
            [torch.zeros(0), *(parts[f][i].flatten() for i in range(n) for f in range(features))]
        ),
    )
    for value, expected in zip(move([turned], transpose.inverse), values, strict=True):
        assert torch.equal(value, expected)


def test_permute_is_what_a_batch_selects():
    lengths = torch.tensor([[3, 0, 2, 5], [1, 1, 1, 1]])
    order = torch.tensor([2, 0, 3, 1])
    values = [torch.arange(10), torch.arange(4) * 7]
    for value, row, moved in zip(
        values, lengths, move(values, plan_permute(lengths, order)), strict=True
    ):
        assert torch.equal(moved, Jagged(value, row).select(order).values)


def test_gradients_go_back():
    plan = plan_dispatch(np.array([[2, 1], [0, 3]]), [1, 0], [1, 1], [(2,), ()])
    leaves = [
        torch.randn(3, 2, dtype=torch.float64).requires_grad_(),
        torch.randn(3, dtype=torch.float64).requires_grad_(),
    ]
    assert torch.autograd.gradcheck(lambda *values: move(values, plan), leaves)


@pytest.mark.parametrize("function", [move, triton_jagged.move], ids=["plain", "triton"])
class TestBadInput:
    def refused(self, message, function, values):
        with pytest.raises(ValueError, match=message):
            function(
                values,
                plan_permute(torch.tensor([[2, 3], [1, 0]]), torch.tensor([1, 0]), [(), (4,)]),
            )

    def test_values(self, function):
        ids, rows = torch.zeros(5), torch.zeros(1, 4)
        self.refused("moves 2 tensors, not 1", function, [ids])
        self.refused(
            r"must be \[5\] as its lengths add up, not \[6\]", function, [torch.zeros(6), rows]
        )
        self.refused(r"must be \[1, 4\]", function, [ids, torch.zeros(4)])
        self.refused("share a dtype", function, [ids, rows.half()])
        self.refused("different devices", function, [ids, torch.zeros(1, 4, device="meta")])


def test_bad_plans():
    lengths = torch.tensor([[2, 3], [1, 0]])
    for message, build in {
        "lengths must be int64": lambda: plan_transpose(lengths.int()),
        "lengths must be integers": lambda: plan_transpose(lengths.double().numpy()),
        "features, samples": lambda: plan_transpose(lengths[0]),
        "0 or more, not -1": lambda: plan_transpose(torch.tensor([[-1]])),
        "2 features have lengths, 1 have shapes": lambda: plan_transpose(lengths, [()]),
        "each of the 2 samples once": lambda: plan_permute(lengths, torch.tensor([1, 1])),
        "each of the 2 samples": lambda: plan_permute(lengths, torch.tensor([1])),
        "order must be int64": lambda: plan_permute(lengths, torch.tensor([1.0, 0.0])),
        "add up to 2 samples; they add up to 3": lambda: plan_dispatch(lengths, [0, 1], [1, 2]),
        "counts must be 0 or more": lambda: plan_combine(lengths, [3, -1]),
        "trailing sizes": lambda: plan_transpose(lengths, [(), (0,)]),
    }.items():
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone")
def test_no_gpu():
    with pytest.raises(ValueError, match="on a GPU"):
        triton_jagged.move([torch.zeros(2)], plan_transpose(torch.tensor([[2]])))
    with pytest.raises(ValueError, match="up to 8 bytes"):
        triton_jagged.move(
            [torch.zeros(2, dtype=torch.complex128)], plan_transpose(torch.tensor([[2]]))
        )
