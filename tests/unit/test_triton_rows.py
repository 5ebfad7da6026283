"""Triton rows, unique keys and masks against their plain twins, through Triton's interpreter; the
plain ones against Python."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import interpreter, kernel_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels.requests import reference as unique
from freescale.kernels.requests import triton as triton_unique
from freescale.kernels.row_updates import triton as triton_row_updates
from freescale.kernels.rows import triton as triton_rows


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
    assert found.counts.tolist() == [
        sum(k < 4 for k in different),
        0,
        sum(k >= 4 for k in different),
    ]
    assert found.keys.tolist() == different
    assert [different[i] for i in found.inverse.tolist()] == values


class TestBadInput:
    weight, numbers, gradients = torch.zeros(9, 4), torch.tensor([1, 2]), torch.zeros(2, 4)

    def refused(self, message, function, *arguments, **options):
        with pytest.raises(ValueError, match=message):
            function(*arguments, **options)

    def test_numbers(self):
        self.refused(
            "int64 or int32, not torch.float32",
            triton_rows.gather_rows,
            self.weight,
            self.gradients[0],
        )
        self.refused("with 2 axes", triton_rows.gather_rows, self.weight, self.numbers[None])
        self.refused("int64 or int32", triton_rows.read_rows, self.weight, self.numbers.bool())

    def test_tables(self):
        self.refused("weight must be", triton_rows.gather_rows, self.weight[0], self.numbers)
        self.refused("weight must be", triton_rows.gather_rows, self.weight.double(), self.numbers)
        self.refused(
            "weight must be contiguous", triton_rows.gather_rows, self.weight.t(), self.numbers
        )
        self.refused("1 to 4096 wide", triton_rows.gather_rows, torch.zeros(1, 5000), self.numbers)
        self.refused(
            "weight must be .*float32, not torch.bfloat16",
            triton_row_updates.sgd,
            self.weight.bfloat16(),
            self.numbers,
            self.gradients,
            lr=1.0,
        )

    @pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone")
    def test_no_gpu(self):
        self.refused("on a GPU", triton_rows.gather_rows, self.weight, self.numbers)
        self.refused("on a GPU", triton_unique.find_members, self.numbers, self.numbers)

    def test_devices(self):
        there = self.weight.to("meta")
        self.refused("different devices", triton_rows.gather_rows, there, self.numbers)
        self.refused(
            "different devices",
            triton_row_updates.adagrad,
            self.weight,
            self.weight,
            self.numbers,
            self.gradients.to("meta"),
            lr=1.0,
            eps=1.0,
        )
        self.refused(
            "different devices", triton_unique.deduplicate, self.numbers, self.numbers.to("meta")
        )

    def test_keys(self):
        self.refused("keys must be", triton_unique.find_members, torch.tensor([True]), self.numbers)
        for module in (unique, triton_unique):
            self.refused("int64 tensor", module.collision_masks, self.numbers, self.numbers.int())
            self.refused("edges must be", module.deduplicate, self.numbers, self.numbers.int())
