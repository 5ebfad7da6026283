"""Curves of shapes that were not measured: exact for the arithmetic of HSTU, marked beyond it."""

from __future__ import annotations

import pytest

from freescale.simulate.compute import Curve, Shape, interpolate_shape, load_calibration


def follow_the_arithmetic(width: int, heads: int = 4, times: float = 1.0) -> Shape:
    """Attention grows with the width, projections with its square, norms with the width, launches
    not at all."""

    def curve(scale: float) -> Curve:
        linear = 3e-14 * width * width + 2e-12 * width
        return Curve(*(scale * times * x for x in (4e-15 * width, linear, 1e-6, 1e-3)))

    return Shape(width, heads, "bf16", 100 * width, *map(curve, (1.0, 2.0, 0.1, 0.2)))


MEASURED = [follow_the_arithmetic(width) for width in (512, 128, 256)]  # in any order


def assert_same(found: Shape, expected: Shape) -> None:
    for way in ("forward", "backward", "head_forward", "head_backward"):
        for term in ("quadratic", "linear", "sample", "constant"):
            value = getattr(getattr(expected, way), term)
            assert getattr(getattr(found, way), term) == pytest.approx(value, rel=1e-9), (way, term)


def test_a_measured_shape_is_taken_as_it_is():
    assert interpolate_shape(MEASURED, 256, 4, "bf16") == (MEASURED[2], [])


@pytest.mark.parametrize("width", [132, 192, 384, 508])
def test_between_measured_widths_the_arithmetic_is_met(width):
    found, (note,) = interpolate_shape(MEASURED, width, 4, "bf16")
    assert_same(found, follow_the_arithmetic(width))
    assert (found.width, found.heads, found.longest) == (
        width,
        4,
        12_800 if width < 256 else 25_600,
    )
    assert note.startswith(f"compute of width {width} is interpolated between")


def test_beyond_the_measured_widths_it_is_scaled_and_marked():
    narrow, (low,) = interpolate_shape(MEASURED, 64, 4, "bf16")
    wide, (high,) = interpolate_shape(MEASURED, 1024, 4, "bf16")
    for note in (low, high):
        assert note.startswith("EXTRAPOLATED") and "from 128 to 512" in note
    least, most = follow_the_arithmetic(128).forward, follow_the_arithmetic(512).forward
    assert narrow.forward == Curve(
        least.quadratic / 2, least.linear / 2, least.sample, least.constant
    )
    assert wide.forward == Curve(2 * most.quadratic, 4 * most.linear, most.sample, most.constant)


def test_the_nearest_number_of_heads_stands_for_others():
    slower = follow_the_arithmetic(256, heads=16, times=2.0)
    found, (note,) = interpolate_shape([*MEASURED, slower], 256, 8, "bf16")
    assert found.heads == 8 and "8 heads" in note
    assert_same(interpolate_shape([*MEASURED, slower], 256, 32, "bf16")[0], slower)
    assert_same(interpolate_shape([*MEASURED, slower], 256, 2, "bf16")[0], MEASURED[2])


def test_another_precision_is_marked():
    found, notes = interpolate_shape(MEASURED, 256, 4, "tf32")
    assert_same(found, MEASURED[2])
    assert notes == ["EXTRAPOLATED: compute in tf32; the curve was measured in bf16"]


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="--width 100 is not a multiple of --heads 3"):
        interpolate_shape(MEASURED, 100, 3, "bf16")
    with pytest.raises(ValueError, match="has no shapes"):
        interpolate_shape([], 64, 2, "bf16")


def test_a_shape_that_was_measured_is_met_by_its_neighbours():
    """Of the H200's curve: width 256 from 128 and 512, of which it was no part. Attention, which
    takes the most time, is met by 10 %."""
    shapes = load_calibration("h200").shapes
    measured = next(shape for shape in shapes if shape.width == 256)
    others = [shape for shape in shapes if shape.width != 256]
    found, _ = interpolate_shape(others, 256, 4, "bf16")
    for way in ("forward", "backward"):
        predicted, actual = getattr(found, way).quadratic, getattr(measured, way).quadratic
        assert predicted == pytest.approx(actual, rel=0.1)
