"""Triton rows, unique keys and masks against their plain twins, through Triton's interpreter; the plain ones against Python."""

from __future__ import annotations

import sys

import interpreter
import kernel_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding import collision
from freescale.kernels import triton_rows, triton_unique, unique


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(kernel_cases.__file__, "rows")


@pytest.mark.parametrize("case", kernel_cases.ROWS)
def test_the_kernel_equals_its_twin(interpreted, case):
    assert kernel_cases.holds(interpreted[case]), interpreted[case]


keys = st.lists(st.integers(0, 12), max_size=20)


@settings(deadline=None)
@given(keys)
def test_unique_keys(values):
    found = unique.deduplicate(torch.tensor(values, dtype=torch.int64), torch.tensor([4, 4, 13]))
    different = sorted(set(values))
    assert found.counts.tolist() == [sum(k < 4 for k in different), 0, sum(k >= 4 for k in different)]
    assert found.cut(len(different)).keys.tolist() == different
    assert found.keys[len(different) :].tolist() == [-1] * (len(values) - len(different))
    assert [different[i] for i in found.inverse.tolist()] == values
    starts, order = found.starts.tolist(), found.order.tolist()
    assert [order[a:b] for a, b in zip(starts, starts[1:])][: len(different)] == [
        [i for i, value in enumerate(values) if value == key] for key in different
    ]


@settings(deadline=None)
@given(keys, keys)
def test_collisions_are_those_of_the_exchange(current, coming):
    rows = torch.tensor(current, dtype=torch.int64), torch.tensor(coming, dtype=torch.int64)
    for ours, theirs in zip(unique.collision_masks(*rows), collision.collision_masks(*rows), strict=True):
        assert torch.equal(ours, theirs)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5))
def test_parts(pieces):
    flat = [value for piece in pieces for value in piece]
    (half,) = unique.part([torch.tensor(flat, dtype=torch.bool)], [[len(piece) for piece in pieces]])
    assert half.counts == [sum(piece) for piece in pieces]
    assert half.chosen.tolist() == [i for i, value in enumerate(flat) if value]
    assert half.rest.tolist() == [i for i, value in enumerate(flat) if not value]


class TestBadInput:
    weight, numbers, gradients = torch.zeros(9, 4), torch.tensor([1, 2]), torch.zeros(2, 4)

    def refused(self, message, function, *arguments, **options):
        with pytest.raises(ValueError, match=message):
            function(*arguments, **options)

    def test_numbers(self):
        self.refused("int64 or int32, not torch.float32", triton_rows.gather_rows, self.weight, self.gradients[0])
        self.refused("with 2 axes", triton_rows.gather_rows, self.weight, self.numbers[None])
        self.refused("int64 or int32", triton_rows.read_rows, self.weight, self.numbers.bool())

    def test_tables(self):
        self.refused("weight must be", triton_rows.gather_rows, self.weight[0], self.numbers)
        self.refused("weight must be", triton_rows.gather_rows, self.weight.double(), self.numbers)
        self.refused("weight must be contiguous", triton_rows.gather_rows, self.weight.t(), self.numbers)
        self.refused("1 to 4096 wide", triton_rows.gather_rows, torch.zeros(1, 5000), self.numbers)
        self.refused("weight must be .*float32, not torch.bfloat16", triton_rows.sgd, self.weight.bfloat16(), self.numbers,
                     self.gradients, lr=1.0)  # fmt: skip

    @pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone")
    def test_no_gpu(self):
        self.refused("on a GPU", triton_rows.gather_rows, self.weight, self.numbers)
        self.refused("on a GPU", triton_unique.members, self.numbers, self.numbers)
        self.refused("on a GPU", triton_unique.part, [self.numbers > 1], [[2]])

    def test_devices(self):
        there = self.weight.to("meta")
        self.refused("different devices", triton_rows.gather_rows, there, self.numbers)
        self.refused("different devices", triton_rows.adagrad, self.weight, self.weight, self.numbers, self.gradients.to("meta"),
                     lr=1.0, eps=1.0)  # fmt: skip
        self.refused("different devices", triton_unique.deduplicate, self.numbers, self.numbers.to("meta"))

    def test_masks(self):
        mask = torch.tensor([True, False])
        for module in (unique, triton_unique):
            self.refused("add up to 3, it has 2", module.part, [mask], [[1, 2]])
            self.refused("bool", module.part, [mask.int()], [[2]])
            self.refused("as many lists", module.part, [mask], [])
            self.refused("keys must be", module.members, mask, self.numbers)
            self.refused("edges must be", module.deduplicate, self.numbers, self.numbers.int())
