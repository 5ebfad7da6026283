"""Sums of blocks in C beside the plain version, and after rows were replaced beside sums that are
made anew."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from helpers import plain_checksums as plain

from freescale.kernels import native as bindings
from freescale.kernels.checksums import native


@pytest.fixture(autouse=True)
def needs_c():
    assert bindings.load_native() is not None, bindings.explain_missing_native()


# rows, width, dtype: rows of whole words; across blocks; of half words; of bytes; less than a block
SHAPES = [
    (5000, (64,), torch.float32),
    (7000, (25,), torch.float64),
    (9001, (50,), torch.bfloat16),
    (40_000, (), torch.float32),
    (70_003, (3,), torch.uint8),
    (9, (3,), torch.float32),
    (0, (4,), torch.float32),
]


def draw(rows, width, dtype, seed=0):
    maker = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (rows, *width), generator=maker).to(dtype)


@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES)
def test_threads_sum_what_one_sums(monkeypatch, rows, width, dtype):
    value = draw(rows, width, dtype)
    monkeypatch.setattr(native, "_PART", native.BYTES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert np.array_equal(native.sum_blocks(value), plain.sum_blocks(value))


@pytest.mark.parametrize("version", [native, plain], ids=["native", "plain"])
@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES)
def test_sums_of_a_file_are_those_of_a_tensor(monkeypatch, rows, width, dtype, version):
    value = draw(rows, width, dtype)
    monkeypatch.setattr(native, "_PART", native.BYTES)
    file = os.memfd_create("test")
    os.pwrite(file, native.as_bytes(value).data, 64)
    assert np.array_equal(version.sum_file(file, 64, value.nbytes, 3), plain.sum_blocks(value))
    with pytest.raises(OSError, match="a file ends at byte"):
        version.sum_file(file, 64, value.nbytes + native.BYTES + 1, 3)
    os.close(file)


@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES)
def test_sums_and_copies(rows, width, dtype):
    value = draw(rows, width, dtype)
    expected = plain.sum_blocks(value)
    assert np.array_equal(native.sum_blocks(value), expected)
    into = torch.zeros_like(value)
    assert np.array_equal(native.copy_blocks(value, into), expected)
    assert torch.equal(into, value)


@pytest.mark.parametrize("rows", [0, 1])
def test_strides_that_mean_nothing_change_no_sum(rows):
    value = torch.arange(6.0).view(3, 2)[:rows, 1]
    for version in (native, plain):
        assert np.array_equal(version.sum_blocks(value), plain.sum_blocks(torch.ones(rows)))


@pytest.mark.parametrize("version", [native, plain], ids=["native", "plain"])
@pytest.mark.parametrize("packed", [False, True], ids=["of a table", "packed"])
@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES)
def test_sums_follow_the_rows(rows, width, dtype, packed, version):
    into, source = draw(rows, width, dtype), draw(rows, width, dtype, seed=1)
    sums = plain.sum_blocks(into)
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(2))[: rows // 3 + 1]
    chosen = torch.cat([chosen, torch.tensor([rows - 1])]).unique() if rows else chosen
    expected = into.clone()
    expected[chosen] = source[chosen]
    version.replace_rows(into, sums, chosen, source[chosen] if packed else source, packed)
    assert torch.equal(into, expected)
    assert np.array_equal(sums, plain.sum_blocks(expected))
