"""Numbers that are not finite are found wherever they are, of any type, without a second tensor of
the size."""

import pytest
import torch

from freescale.train.state import finite_check
from freescale.train.state.finite_check import find_not_finite

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e5m2,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("bad", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize("background", [False, True])
def test_one_number_anywhere_is_found(monkeypatch, dtype, bad, background):
    """Beside training, in pieces where a tensor is large."""
    monkeypatch.setattr(finite_check, "_ALONE", 10)
    monkeypatch.setattr(finite_check, "_PIECE", 60)
    for size in (1, 7, 64, 1000):
        for place in (0, size // 2, size - 1):
            values = torch.ones(size, dtype=torch.float32).to(dtype)
            assert find_not_finite({"a": values}, background=background) is None
            values[place] = bad
            assert find_not_finite({"a": torch.ones(30), "b": values}, background=background) == "b"


def test_what_was_copied_together_is_named_one_by_one(monkeypatch):
    monkeypatch.setattr(finite_check, "_ALONE", 10)
    looked_at = []
    is_finite = finite_check._is_finite
    monkeypatch.setattr(
        finite_check, "_is_finite", lambda value: looked_at.append(value) or is_finite(value)
    )
    parts = dict(zip("abc", torch.zeros(60).split(20), strict=True))
    assert find_not_finite(parts, background=True) is None and len(looked_at) == 1
    parts["b"][3] = INFINITE
    assert find_not_finite(parts, background=True) == "b"
    assert find_not_finite(parts, {"b"}, background=True) is None


def test_the_largest_numbers_are_finite():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        largest = torch.finfo(dtype).max
        assert (
            find_not_finite({"a": torch.tensor([largest, -largest, largest], dtype=dtype)}) is None
        )


def test_what_has_no_such_numbers_is_passed_over():
    assert (
        find_not_finite(
            {"a": torch.tensor([1, 2]), "b": torch.tensor([True]), "c": torch.empty(0, 3)}
        )
        is None
    )
    assert find_not_finite({}) is None


def test_what_is_not_trained_may_be_infinite_and_must_be_numbers():
    """Masks of attention are."""
    mask = torch.full((4, 4), -INFINITE).triu(1)
    assert find_not_finite({"mask": mask}) == "mask"
    assert find_not_finite({"mask": mask}, {"mask"}) is None
    assert find_not_finite({"mask": mask * 0}, {"mask"}) == "mask"
