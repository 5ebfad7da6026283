"""Predicts the time of a rank's own work from curves that were measured on a device (`freescale
simulate calibrate`) and are stored in calibrations/*.json.

    forward, backward of a layer    quadratic * sum L^2 + linear * tokens + sample * samples
                                    + constant; and of the head, once
    lookup, update, ... of rows     seconds per byte or per key, and a constant per call
    dense optimizer                 seconds per parameter, and a constant

A file holds the model shapes that were measured. The terms of a curve grow with the width like the
arithmetic behind them:

    quadratic          attention: in proportion to the width
    linear             projections and norms: a part in proportion, a part with its square
    sample, constant   launches and planning: not at all

Between two measured widths the first two are interpolated per unit of width and the others as they
are, which is exact for this arithmetic. Lengths and widths beyond those measured are an
extrapolation, and notes say so. The number of heads matters little at the same width: the nearest
measured number is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.balance.cost import square
from freescale.config import SimulateConfig
from freescale.simulate.network import check_number, find_file
from freescale.visible import Visible

CALIBRATIONS = Path(__file__).parent / "calibrations"
WAYS = ("forward", "backward", "head_forward", "head_backward")  # curves of a shape


@dataclass(frozen=True)
class Load:
    """The work of each rank in a step, each [ranks]."""

    samples: NDArray[Any]
    tokens: NDArray[Any]
    squares: NDArray[Any]  # sum of L^2, or of twice the pairs that see each other

    @staticmethod
    def from_assignment(
        lengths: NDArray[Any], rank_of: NDArray[Any], ranks: int, visible: Visible | None = None
    ) -> Load:
        length = lengths.astype(np.float64)
        powers = np.ones_like(length), length, square(length, visible)
        return Load(*(np.bincount(rank_of, weights, ranks) for weights in powers))

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
    forward: Curve  # curve of one layer
    backward: Curve
    head_forward: Curve = Curve(0.0, 0.0)  # once, after the layers
    head_backward: Curve = Curve(0.0, 0.0)


def interpolate_shape(
    shapes: Sequence[Shape], width: int, heads: int, precision: str
) -> tuple[Shape, list[str]]:
    """The curves of a model shape from those measured, and notes for readers of the results: none
    if exactly this shape was measured. ValueError if nothing was measured, or the width is not a
    multiple of the heads."""
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


@dataclass(frozen=True)
class Model:
    """An HSTU encoder and its item table."""

    width: int = SimulateConfig.width
    layers: int = SimulateConfig.layers
    heads: int = SimulateConfig.heads
    precision: str = "bf16"
    longest: int = SimulateConfig.cap  # its position table has one more row
    dense: int | None = None  # dense parameters, if not those of HSTU
    row_optimizer: str = SimulateConfig.row_optimizer  # of the table
    negatives: int = 0  # per position, for the balancer's cost model
    entry_bytes: int = 4  # of an entry of a row or gradient in a message
    prefix: int = 0  # tokens before each history: a feature of the users each
    visible: Visible | None = None  # earlier events that an event attends to; None: all

    @property
    def parameters(self) -> int:
        """Dense ones: positions; per layer two norms, the projection to u, v, q, k and the one
        back."""
        if self.dense is not None:
            return self.dense
        width = self.width
        layer = 4 * width + (4 * width * width + 4 * width) + (width * width + width)
        return (self.longest + 1) * width + self.layers * layer

    @property
    def row_bytes(self) -> int:
        return 4 * self.width  # in memory

    @property
    def sent_row_bytes(self) -> int:
        return self.entry_bytes * self.width


@dataclass(frozen=True)
class RowWork:
    """Seconds of work on ids and table rows: per byte of rows read or written, per key compared."""

    deduplicate_per_key: float
    compare_per_key: float
    lookup_per_byte: float
    update_per_byte: float
    read_per_byte: float  # rows into the tokens' places, in forward
    read_backward_per_byte: float
    constant: float = 0.0  # of a call


@dataclass(frozen=True)
class Calibration:
    """The compute curves of a machine."""

    name: str
    source: str
    machine: Mapping[str, Any]
    date: str
    shapes: tuple[Shape, ...]
    rows: RowWork
    optimizer_per_parameter: float
    optimizer_constant: float
    # of compute while a transport communicates: 1.16 is 16 % slower
    slowdown: Mapping[str, float]
    every_step: float = 0.0  # seconds of the host between steps: data, launching, bookkeeping
    # standard deviation of a rank's forward, and of its backward, from the curve
    jitter: float = 0.0

    def find_shape(self, model: Model) -> Shape:
        """The curves of a model, measured or interpolated. ValueError if there is no such model."""
        return interpolate_shape(self.shapes, model.width, model.heads, model.precision)[0]

    def list_notes(self, model: Model, lengths: NDArray[Any]) -> list[str]:
        """Lists notes about the curve for readers of the results."""
        shape, notes = interpolate_shape(self.shapes, model.width, model.heads, model.precision)
        lines = [f"compute curve: {self.name} of {self.date[:10]} ({self.source})", *notes]
        if not shape.head_forward.linear:
            lines.append("the curve is that of the layers: no head stands behind them")
        longest = int(lengths.max(initial=0))
        if longest > shape.longest:
            lines.append(
                f"EXTRAPOLATED: histories of up to {longest:,} events; the curve was "
                f"measured up to {shape.longest:,}"
            )
        return lines


def load_calibration(name: str | Path) -> Calibration:
    """Loads a shipped calibration by name, or a file. ValueError if it is not a calibration."""
    path = find_file(CALIBRATIONS, name, ".json", "calibration")
    try:
        return parse_calibration(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not a calibration ({type(error).__name__}: {error}); make one "
            "with `calibrate`"
        ) from error


def parse_calibration(raw: Mapping[str, Any]) -> Calibration:
    """Parses the content of a calibration file."""
    shapes = tuple(
        Shape(
            *(one[name] for name in ("width", "heads", "precision", "longest")),
            *(
                _check_not_negative(Curve(**one[way]), f"{way} of width {one['width']}")
                for way in WAYS
                if way in one
            ),
        )
        for one in raw["shapes"]
    )
    slowdown = {name: float(factor) for name, factor in raw["slowdown"].items()}
    for name, factor in slowdown.items():
        if not (np.isfinite(factor) and factor >= 1):
            raise ValueError(f"slowdown of {name} is {factor}; it is a factor, 1 or more")
    return Calibration(
        raw["name"],
        raw["source"],
        raw["machine"],
        raw["date"],
        shapes,
        _check_not_negative(RowWork(**raw["rows"]), "rows"),
        float(raw["optimizer"]["per_parameter"]),
        float(raw["optimizer"]["constant"]),
        slowdown,
        float(raw.get("every_step", 0.0)),
        float(raw.get("jitter", 0.0)),
    )


def _check_not_negative(curve: Any, what: str) -> Any:
    for entry in fields(curve):
        check_number(f"{what}: {entry.name}", getattr(curve, entry.name))
    return curve
