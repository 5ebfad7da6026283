"""Draws the small charts of the report, as SVG text. Colours are classes of static/style.css, so
that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from freescale.report.glossary import explain

T = TypeVar("T")

# A panel is about as wide as a phone, to stay readable there; wider screens show several side by
# side.
WIDTH, HEIGHT = 320, 195
RIGHT, TOP, BOTTOM = 12, 10, 40
LABEL, GLYPH = 20, 7.2  # pixels: a label next to the axis, and a digit of a tick
POINTS = 400  # of a line, at most
MARKED = 12  # points of a line that has a mark at each of them, at most


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    style: str  # a CSS class
    points: Sequence[tuple[float, float]]


def render_panel(title: str, chart: str) -> str:
    """A chart with its caption."""
    return f"<figure><figcaption>{explain(title)}</figcaption>{chart}</figure>"


def render_panels(panels: Sequence[str]) -> str:
    """Charts side by side, if there is room."""
    return f'<div class="panels">{"".join(panels)}</div>'


def choose_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Chooses round numbers from below `low` to above `high`."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / most))
    unit *= next(factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (unit * factor) <= most)
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    return [place * unit for place in range(first, max(last, first + 1) + 1)]


def format_tick(value: float) -> str:
    """Formats a number for an axis."""
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):g}{letter}"
    return f"{value:.6g}"


def thin(points: Sequence[T], most: int) -> list[T]:
    """Chooses at most `most` points evenly, the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[(place + 1) * len(points) // most - 1] for place in range(most)]


class Panel:
    """The axes of a chart with their labels, and the scale for what is drawn between them."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], x_label: str, y_label: str
    ) -> None:
        self.marks = choose_ticks(*y)
        # As wide as the longest tick: the axis' label is next to them, not over them.
        self.left = LABEL + 8 + GLYPH * max(len(format_tick(value)) for value in self.marks)
        self._x0, self._x1 = x if x[1] > x[0] else (x[0] - 1, x[0] + 1)
        self._y0, self._y1 = self.marks[0], self.marks[-1]
        self._x_label, self._y_label = x_label, y_label

    def x(self, value: float) -> float:
        return self.left + (value - self._x0) / (self._x1 - self._x0) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        return (
            HEIGHT - BOTTOM - (value - self._y0) / (self._y1 - self._y0) * (HEIGHT - TOP - BOTTOM)
        )

    def draw(self, inside: Sequence[str], title: str) -> str:
        """Draws the axes, and `inside` (SVG) between them."""
        words, left = escape(title, quote=True), self.left
        parts = [
            (
                f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
                f'aria-label="{words}"><title>{words}</title>'
            )
        ]
        for value in self.marks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
            words_at = f'x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end"'
            parts.append(f"<text {words_at}>{format_tick(value)}</text>")
        for value in choose_ticks(self._x0, self._x1):
            if self._x0 <= value <= self._x1 and float(value).is_integer():  # there is no half step
                x = self.x(value)
                parts.append(f'<path class="axis" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>')
                parts.append(
                    f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" '
                    f'text-anchor="middle">{format_tick(value)}</text>'
                )
        parts.append(f'<path class="axis" d="M{left:.1f} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        middle = left + (WIDTH - left - RIGHT) / 2
        parts.append(
            f'<text class="label" x="{middle:.1f}" y="{HEIGHT - 6}" '
            f'text-anchor="middle">{escape(self._x_label)}</text>'
        )
        across = TOP + (HEIGHT - TOP - BOTTOM) / 2
        turned = f'transform="rotate(-90 11 {across})"'
        parts.append(
            f'<text class="label" x="11" y="{across}" text-anchor="middle" '
            f"{turned}>{escape(self._y_label)}</text>"
        )
        return "".join([*parts, *inside, "</svg>"])


def draw_lines(
    series: Sequence[Series], y_label: str, x_label: str = "step", zero: bool = False
) -> str:
    """Draws a line per series, and its points where these are few. With `zero` the y axis begins
    at 0."""
    everything = [point for one in series for point in one.points]
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    reach = (min(x for x, _ in everything), max(x for x, _ in everything))
    panel = Panel(reach, (min(0.0, low) if zero else low, high), x_label, y_label)
    parts = []
    for one in series:
        points = thin(one.points, POINTS)
        path = "L".join(f"{panel.x(x):.1f} {panel.y(y):.1f}" for x, y in points)
        title = f"<title>{escape(one.name)}</title>"
        parts.append(
            f'<path class="line {one.style}" '
            f'd="M{path}{"h0" if len(points) == 1 else ""}">{title}</path>'
        )
        if len(points) <= MARKED:
            marks = "".join(f"M{panel.x(x):.1f} {panel.y(y):.1f}h0" for x, y in points)
            parts.append(f'<path class="marks {one.style}" d="{marks}"/>')
    return panel.draw(parts, f"{y_label} over {x_label}: {', '.join(one.name for one in series)}")


def draw_dots(
    steps: Sequence[float],
    values: Sequence[Sequence[float]],
    reach: tuple[float, float],
    y_label: str,
    title: str,
    style: str,
) -> str:
    """Draws a dot per rank and step, with a line at 1, the mean. `values`: [steps][ranks]."""
    panel = Panel((steps[0], steps[-1]), reach, "step", y_label)
    parts = [f'<path class="mean" d="M{panel.left:.1f} {panel.y(1):.1f}H{WIDTH - RIGHT}"/>']
    for of_rank in zip(*values, strict=True):
        path = "".join(
            f"M{panel.x(step):.1f} {panel.y(value):.1f}h0"
            for step, value in zip(steps, of_rank, strict=True)
        )
        parts.append(f'<path class="dots {style}" d="{path}"/>')
    return panel.draw(parts, title)
