"""Picture of a run through ten faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale_bench.common import drawing as svg
from freescale_bench.common.markdown import Results, single

_SHOWN = 10  # faults
_LEFT, _TOP, _HIGH = 56, 34, 230


def draw_faults(used: Results) -> str:
    """Draws steps over time of the first storm. The line falls where steps are repeated."""
    result = single(used)
    row = result["rows"][0]
    events = row["events"][:_SHOWN]
    end = _end(events)
    points = [(float(at), int(step)) for at, step in row["progress"] if at <= end]
    begin = points[0][0]
    most = max(step for _, step in points) + 3
    wide = svg.LEAST_WIDTH - _LEFT - 24

    def x_of(seconds: float) -> float:
        return _LEFT + (seconds - begin) / (end - begin) * wide

    def y_of(step: float) -> float:
        return _TOP + _HIGH - step / most * _HIGH

    parts = [svg.text(_LEFT, 18, "steps of a run through ten faults", more='font-weight="bold"')]
    unit = next(unit for unit in svg.UNITS if most / unit <= 6)
    for number in range(int(most / unit) + 1):
        y = y_of(number * unit)
        parts.append(svg.rule(_LEFT, y, _LEFT + wide, y, "#e6e6e6"))
        parts.append(svg.text(_LEFT - 7, y + 4, f"{number * unit:g}", "end"))
    second = next(unit for unit in svg.UNITS if (end - begin) / unit <= 10)
    for number in range(int((end - begin) / second) + 1):
        x = x_of(begin + number * second)
        parts.append(svg.text(x, _TOP + _HIGH + 18, f"{number * second:g} s", "middle"))
    for number, event in enumerate(events, 1):
        x, until = x_of(event["begin_s"]), x_of(event["begin_s"] + event["lasted_s"])
        parts.append(
            svg.rect(x, _TOP, max(until - x, 1), _HIGH, svg.ORANGE, more='fill-opacity="0.18"')
        )
        parts.append(svg.rule(x, _TOP, x, _TOP + _HIGH, svg.RED))
        parts.append(svg.text(x, _TOP - 4, f"{number}", "middle"))
    for attempt in _split(points, events):
        path = " ".join(f"{x_of(seconds):.1f},{y_of(step):.1f}" for seconds, step in attempt)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{svg.BLUE}" stroke-width="2"/>'
        )
    below, half = _TOP + _HIGH + 44, (len(events) + 1) // 2
    for place, event in enumerate(events):
        x, y = _LEFT + wide / 2 * (place // half), below + 17 * (place % half)
        parts.append(svg.text(x, y, f"{place + 1}  {_describe(event)}"))
    below += 17 * half + 8
    note = (
        f"{row['world']} ranks. Red: a fault happens. Shaded: until the next step. Where the line "
        "falls, steps since the last checkpoint are repeated."
    )
    words, tall = svg.caption(_LEFT, below, wide, used, note)
    return svg.finish([*svg.begin(svg.LEAST_WIDTH, below + tall), *parts, *words])


def _end(events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds: shortly after the end of the last event."""
    return max(float(event["begin_s"] + event["lasted_s"]) for event in events) + 0.5


def _split(
    points: Sequence[tuple[float, int]], events: Sequence[Mapping[str, Any]]
) -> list[list[tuple[float, int]]]:
    """Splits the points at restarts, during which the run made no step."""
    ends = [event["begin_s"] + event["lasted_s"] for event in events]
    attempts: list[list[tuple[float, int]]] = [[]]
    for point in points:
        last = attempts[-1][-1] if attempts[-1] else None
        if last is not None and (
            point[1] <= last[1] or any(last[0] < end <= point[0] + 1e-3 for end in ends)
        ):
            attempts.append([])
        attempts[-1].append(point)
    return attempts


def _describe(event: Mapping[str, Any]) -> str:
    kind = event["kind"].replace("kill in", "kill during")
    return f"{kind}, rank {event['rank']}, {event['struck_at']}: {event['lasted_s']:.1f} s"
