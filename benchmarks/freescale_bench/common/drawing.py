"""Parts of the pictures as plain SVG: axes, lines, bars, captions. On white, to be readable on
light and dark pages.

Measured lines are solid with filled dots; predicted ones are dashed with hollow dots. All bars are
measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

TEXT = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333"'
SMALL = 'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="#666"'
GREY, RED, TEAL, BLUE, ORANGE, GREEN, VIOLET, BROWN = (
    "#7f7f7f", "#e45756", "#72b7b2", "#2f4b7c", "#f2a541", "#54a24b", "#b279a2", "#9d755d",
)  # fmt: skip
INK = (GREY, RED, TEAL, BLUE, ORANGE, GREEN, VIOLET, BROWN)
UNITS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 2000, 5000)
LETTER = 6.1  # average width in pixels
# of a picture: pages scale all pictures to one width, and text should come out the same size
LEAST_WIDTH = 860
NOTE = "Solid lines, filled dots: measured. Dashed lines, hollow dots: predicted."


def text(
    x: float, y: float, words: str, anchor: str = "start", more: str = "", style: str = TEXT
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more} '
        f"{style}>{escape(words, quote=False)}</text>"
    )


def rect(
    x: float, y: float, wide: float, high: float, ink: str, more: str = "", tip: str = ""
) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.2f}" height="{high:.1f}" fill="{ink}" {more}'
    return f"<rect {box}><title>{escape(tip)}</title></rect>" if tip else f"<rect {box}/>"


def rule(x: float, y: float, to_x: float, to_y: float, ink: str, more: str = "") -> str:
    ends = f'x1="{x:.1f}" x2="{to_x:.1f}" y1="{y:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{ink}" {more}/>'


def begin(width: float, height: float) -> list[str]:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        'role="img">'
    )
    return [head, '<rect width="100%" height="100%" fill="#fff"/>']


def finish(parts: Sequence[str]) -> str:
    return "\n".join([*parts, "</svg>"]) + "\n"


def save(path: Path, picture: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture, encoding="utf-8")


# ---- sources of the numbers


def describe_machine(result: Mapping[str, Any]) -> str:
    """Names the GPU, or the CPU and its cores."""
    machine = result["machine"]
    return machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"


def describe_origin(result: Mapping[str, Any]) -> str:
    """Machine and date; the commit is in the result itself."""
    return f"{describe_machine(result)}, {result['date'][:10]}"


def caption(
    left: float, top: float, wide: float, used: Mapping[str, Mapping[str, Any]], *notes: str
) -> tuple[list[str], float]:
    """Draws the notes in lines of at most `wide`, then the sources. Returns (parts, height)."""
    lines = [line for note in notes for line in wrap(note, int(wide / 5.7))]
    lines += [f"{name}.json: {describe_origin(result)}" for name, result in used.items()]
    return [
        text(left, top + 15 * place, line, style=SMALL) for place, line in enumerate(lines)
    ], 15.0 * len(lines)


# ---- line plots


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    ink: str
    predicted: bool = False
    bars: Sequence[tuple[float, float, float]] = ()  # x, low, high


@dataclass(frozen=True)
class Axes:
    """A line plot. `ticks`: (value, label), evenly spaced, or at their values if `linear`."""

    title: str
    below: str
    ticks: Sequence[tuple[float, str]]
    lines: Sequence[Line]
    linear: bool = False
    wide: float = 250
    high: float = 180

    def draw(self, left: float, top: float) -> list[str]:
        """Draws the plot at (`left`, `top`); title and labels extend beyond it."""
        most = max(
            [y for line in self.lines for _, y in line.points]
            + [b[2] for line in self.lines for b in line.bars],
            default=1.0,
        )
        unit = next((unit for unit in UNITS if most / unit <= 6), UNITS[-1])
        scale = self.high / (unit * max(1, -(-most // unit)))

        def x_of(value: float) -> float:
            if self.linear:
                first, last = self.ticks[0][0], self.ticks[-1][0]
                return left + (value - first) / (last - first) * self.wide
            return left + [tick for tick, _ in self.ticks].index(value) * self.wide / max(
                1, len(self.ticks) - 1
            )

        def y_of(value: float) -> float:
            return top + self.high - value * scale

        parts = [text(left, top - 14, self.title, more='font-weight="bold"')]
        for number in range(round(self.high / scale / unit) + 1):
            y = y_of(number * unit)
            parts.append(rule(left, y, left + self.wide, y, "#e6e6e6"))
            parts.append(text(left - 7, y + 4, f"{number * unit:g}", "end"))
        for value, label in self.ticks:
            parts.append(rule(x_of(value), y_of(0), x_of(value), y_of(0) + 4, "#999"))
            parts.append(text(x_of(value), top + self.high + 18, label, "middle"))
        parts.append(text(left + self.wide / 2, top + self.high + 36, self.below, "middle"))
        for line in self.lines:
            parts += self._line(line, x_of, y_of)
        return parts

    @staticmethod
    def _line(line: Line, x_of: Any, y_of: Any) -> list[str]:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        dashes = ' stroke-dasharray="5 4"' if line.predicted else ""
        parts = [
            (
                f'<polyline points="{path}" fill="none" stroke="{line.ink}" '
                f'stroke-width="2"{dashes}/>'
            )
        ]
        for x, low, high in line.bars:
            ends = (
                f'x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{y_of(low):.1f}" y2="{y_of(high):.1f}"'
            )
            parts.append(f'<line {ends} stroke="{line.ink}" stroke-opacity="0.5"/>')
        fill = "#fff" if line.predicted else line.ink
        for x, y in line.points:
            tip = f"<title>{escape(line.name)}: {y:.4g}</title>"
            parts.append(
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{fill}" '
                f'stroke="{line.ink}">{tip}</circle>'
            )
        return parts


def legend(lines: Sequence[Line], left: float, top: float, wide: float) -> tuple[list[str], float]:
    """Draws each name once, in rows of at most `wide`. Returns (parts, height)."""
    parts: list[str] = []
    x, y = left, top
    for line in {line.name: line for line in lines}.values():
        needed = 46 + LETTER * len(line.name)
        if x > left and x + needed > left + wide:
            x, y = left, y + 18
        dashes = ' stroke-dasharray="5 4"' if line.predicted else ""
        parts.append(rule(x, y, x + 24, y, line.ink, more=f'stroke-width="2"{dashes}'))
        fill = "#fff" if line.predicted else line.ink
        parts.append(
            f'<circle cx="{x + 12:.1f}" cy="{y}" r="3" fill="{fill}" stroke="{line.ink}"/>'
        )
        parts.append(text(x + 30, y + 4, line.name))
        x += needed
    return parts, y - top + 18


def panels(
    axes: Sequence[Axes], used: Mapping[str, Mapping[str, Any]], columns: int = 3, note: str = NOTE
) -> str:
    """Draws a picture: panels in rows, one legend, and the sources."""
    wide, high = axes[0].wide + 66, axes[0].high + 88
    rows = -(-len(axes) // columns)
    width = max(wide * min(columns, len(axes)) + 16, LEAST_WIDTH)
    names, taken = legend(
        [line for one in axes for line in one.lines], 50, rows * high + 20, width - 70
    )
    below = rows * high + 20 + taken + 6
    words, tall = caption(50, below, width - 70, used, note)
    parts = begin(width, below + tall)
    for place, one in enumerate(axes):
        parts += one.draw(50 + wide * (place % columns), 36 + high * (place // columns))
    return finish([*parts, *names, *words])


# ---- bars


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str
    ink: str
    low: float | None = None  # of the spread
    high: float | None = None


def bars(
    title: str,
    rows: Sequence[Bar],
    left: float,
    top: float,
    wide: float,
    names: bool = True,
    most: float = 0.0,
) -> list[str]:
    """Draws horizontal bars, 22 high, with names to their left. `most`: the value of the full width
    (default: the largest value)."""
    most = most or max([row.high or row.value for row in rows] + [1e-12])
    parts = [text(left, top - 10, title, more='font-weight="bold"')]
    parts.append(rule(left, top - 3, left, top + 22 * len(rows), "#999"))
    for place, row in enumerate(rows):
        y, long = top + 22 * place, max(0.0, row.value) / most * wide
        parts.append(rect(left, y, max(long, 0.8), 15, row.ink))
        end = long
        if row.low is not None and row.high is not None:
            end = row.high / most * wide
            span = (
                f'x1="{left + row.low / most * wide:.1f}" x2="{left + end:.1f}" y1="{y + 7.5}" '
                f'y2="{y + 7.5}"'
            )
            parts.append(f'<line {span} stroke="#333" stroke-opacity="0.6"/>')
        if names:
            parts.append(text(left - 8, y + 12, row.name, "end"))
        parts.append(text(left + end + 6, y + 12, row.label))
    return parts
