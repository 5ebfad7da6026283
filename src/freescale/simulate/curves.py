"""Curves of compute time, and their interpolation for model shapes that were not measured.

The terms of a curve grow with the width like the arithmetic behind them:

    quadratic          attention: in proportion to the width
    linear             projections and norms: a part in proportion, a part with its square
    sample, constant   launches and planning: not at all

Between two measured widths the first two are interpolated per unit of width and the others as they
are, which is exact for this arithmetic. Beyond the measured widths they are scaled by it, with a
note. The number of heads matters little at the same width: the nearest measured number is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

WAYS = ("forward", "backward", "head_forward", "head_backward")  # curves of a shape


@dataclass(frozen=True)
class Load:
    """The work of each rank in a step, each [ranks]."""

    samples: NDArray[Any]
    tokens: NDArray[Any]
    squares: NDArray[Any]  # sum of L^2

    @staticmethod
    def from_assignment(lengths: NDArray[Any], rank_of: NDArray[Any], ranks: int) -> Load:
        length = lengths.astype(np.float64)
        return Load(
            *(
                np.bincount(rank_of, weights, ranks)
                for weights in (np.ones_like(length), length, length * length)
            )
        )

    def with_prefix(self, tokens: int) -> Load:
        """The load if each sample has so many tokens more."""
        squares = self.squares + tokens * (2 * self.tokens + tokens * self.samples)
        return Load(self.samples, self.tokens + tokens * self.samples, squares)


@dataclass(frozen=True)
class Curve:
    """Seconds of one layer, one direction."""

    quadratic: float
    linear: float
    sample: float = 0.0
    constant: float = 0.0

    def __call__(self, load: Load) -> NDArray[Any]:
        """[ranks]; a rank without samples computes nothing."""
        seconds = (
            self.quadratic * load.squares
            + self.linear * load.tokens
            + self.sample * load.samples
            + self.constant
        )
        return np.where(load.samples > 0, seconds, 0.0)


@dataclass(frozen=True)
class Shape:
    """The curves of a model shape."""

    width: int
    heads: int
    precision: str
    longest: int  # measured history
    forward: Curve  # of a layer
    backward: Curve
    head_forward: Curve = Curve(0.0, 0.0)  # once, after the layers
    head_backward: Curve = Curve(0.0, 0.0)


def interpolate_shape(
    shapes: Sequence[Shape], width: int, heads: int, precision: str
) -> tuple[Shape, list[str]]:
    """The curves of a model shape, with notes for readers of the results.

    Args:
        shapes: The measured shapes.
        width: Of embeddings and layers.
        heads: Of the attention.
        precision: Of compute, as in `freescale train`.

    Returns:
        The shape, and notes: none if exactly this shape was measured.

    Raises:
        ValueError: Nothing was measured, or the width is not a multiple of the heads.
    """
    if not shapes:
        raise ValueError("the calibration has no shapes; make one with `calibrate`")
    if width % heads:
        raise ValueError(f"--width {width} is not a multiple of --heads {heads}")
    notes: list[str] = []
    same = [shape for shape in shapes if shape.precision == precision]
    if not same:
        same = [shape for shape in shapes if shape.precision == shapes[0].precision]
        notes.append(
            f"EXTRAPOLATED: compute in {precision}; the curve was measured in {same[0].precision}"
        )
    measured = {
        each: min(
            (shape for shape in same if shape.width == each),
            key=lambda shape: abs(math.log(shape.heads / heads)),
        )
        for each in sorted({shape.width for shape in same})
    }
    below = [shape for each, shape in measured.items() if each <= width]
    above = [shape for each, shape in measured.items() if each >= width]
    used = [*below[-1:], *above[:1]]  # one of them beyond the measured widths
    found = _mix_shapes(used[0], used[-1], width)
    if not (below and above):
        notes.append(
            f"EXTRAPOLATED: width {width}; the curve was measured from {min(measured)} to "
            f"{max(measured)}"
        )
    elif used[0] is not used[-1]:
        notes.append(
            f"compute of width {width} is interpolated between {used[0].width} and {used[-1].width}"
        )
    if others := sorted({shape.heads for shape in used} - {heads}):
        counted = " and ".join(map(str, others))
        notes.append(f"compute of {heads} heads is taken from a curve of {counted}")
    return replace(found, width=width, heads=heads), notes


def _mix_shapes(low: Shape, high: Shape, width: int) -> Shape:
    if low.width == high.width:
        return _scale_shape(low, width)
    share = (width - low.width) / (high.width - low.width)

    def mix(a: Curve, b: Curve) -> Curve:
        def between(first: float, last: float) -> float:
            return (1 - share) * first + share * last

        return replace(
            a,
            quadratic=width * between(a.quadratic / low.width, b.quadratic / high.width),
            linear=width * between(a.linear / low.width, b.linear / high.width),
            sample=between(a.sample, b.sample),
            constant=between(a.constant, b.constant),
        )

    longest = min(low.longest, high.longest)
    return replace(_change_curves(low, high, mix), longest=longest)


def _scale_shape(shape: Shape, width: int) -> Shape:
    """Projections grow with the square of the width above the measured one, and shrink only
    linearly below it: less arithmetic does not make memory faster."""
    factor = width / shape.width

    def scale(curve: Curve, _: Curve) -> Curve:
        linear = curve.linear * (factor * factor if factor > 1 else factor)
        return replace(curve, quadratic=curve.quadratic * factor, linear=linear)

    return _change_curves(shape, shape, scale)


def _change_curves(low: Shape, high: Shape, change: Callable[[Curve, Curve], Curve]) -> Shape:
    changed: dict[str, Any] = {way: change(getattr(low, way), getattr(high, way)) for way in WAYS}
    return replace(low, **changed)
