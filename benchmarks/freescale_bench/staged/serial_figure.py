"""Draws consecutive steps of a run as a picture: per rank a compute lane and a communication lane,
from its trace.

    python -m freescale_bench.staged.serial_figure RUN docs/figures/serial_step.svg --first 20
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from freescale_bench.common.drawing import TEXT, close_svg, open_svg, save

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#2f4b7c",
    "optimizer": "#7a9cc6",
    "update rows": "#72b7b2",
    "lookup": "#9ad0cb",
    "deduplicate": "#b8dcd9",
    "data": "#c9c9c9",
    "count collisions": "#dddddd",
    "counts": "#bab0ac",
    "ids": "#eeca3b",
    "rows": "#f58518",
    "gradients": "#e45756",
    "dense": "#b279a2",
    "samples": "#ff9da6",
}
LANE, GAP, LEFT, WIDTH = 26, 6, 150, 900


def load_events(run: Path, first: int, steps: int) -> tuple[list[dict[str, Any]], float, float]:
    """Events of the chosen steps, and the time they span in microseconds."""
    with gzip.open(run / "trace.json.gz", "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    wanted = {f"step {number}" for number in range(first, first + steps)}
    frames = [event for event in events if event["name"] in wanted]
    if not frames:
        raise SystemExit(f"{run} has no steps {first} to {first + steps - 1} in its trace")
    begin, end = min(e["ts"] for e in frames), max(e["ts"] + e["dur"] for e in frames)
    inside = [
        e
        for e in events
        if e["ts"] >= begin and e["ts"] + e["dur"] <= end + 1 and not e["name"].startswith("step ")
    ]
    return inside + frames, begin, end


def find_straggler_parts(events: list[dict[str, Any]]) -> dict[int, float]:
    """By event: microseconds of a collective before its last rank arrived. All ranks have the same
    ones in the same order."""
    lanes: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        if event["tid"] == 1:
            lanes.setdefault(event["pid"], []).append(event)
    parts: dict[int, float] = {}
    for same in zip(*lanes.values()):
        last = max(event["ts"] for event in same)
        parts |= {id(event): min(event["dur"], last - event["ts"]) for event in same}
    return parts


def draw_steps(events: list[dict[str, Any]], begin: float, end: float, title: str) -> str:
    ranks = 1 + max(event["pid"] for event in events)
    scale = WIDTH / (end - begin)
    names = [name for name in COLOURS if any(event["name"] == name for event in events)]
    height = 60 + ranks * (2 * LANE + 2 * GAP + 10) + 24 * (1 + (len(names) - 1) // 7) + 46
    parts = [*open_svg(LEFT + WIDTH + 20, height), f'<text x="10" y="22" {TEXT}>{title}</text>']
    waits = find_straggler_parts(events)
    for event in sorted(events, key=lambda e: -e["dur"]):
        top = 40 + event["pid"] * (2 * LANE + 2 * GAP + 10)
        x = LEFT + (event["ts"] - begin) * scale
        if event["name"].startswith("step "):
            bottom, dashes = top + 2 * LANE + GAP + 4, 'stroke="#888" stroke-dasharray="3 3"'
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom}" {dashes}/>')
            continue
        y = top + event["tid"] * (LANE + GAP)
        width = max(0.6, event["dur"] * scale)
        tip = f"{event['name']} {event['dur'] / 1e3:.2f} ms"
        fill = COLOURS.get(event["name"], "#999")
        waited = min(width, waits.get(id(event), 0.0) * scale)
        for left, wide, opacity in ((x, waited, 0.3), (x + waited, width - waited, 1.0)):
            box = f'x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{LANE}"'
            parts.append(
                f'<rect {box} fill="{fill}" fill-opacity="{opacity}"><title>{tip}</title></rect>'
            )
    for rank in range(ranks):
        top = 40 + rank * (2 * LANE + 2 * GAP + 10)
        parts.append(f'<text x="10" y="{top + 17}" {TEXT}>rank {rank}: compute</text>')
        parts.append(f'<text x="10" y="{top + LANE + GAP + 17}" {TEXT}>rank {rank}: network</text>')
    base = 40 + ranks * (2 * LANE + 2 * GAP + 10) + 16
    parts.append(f'<text x="{LEFT}" y="{base}" {TEXT}>0 ms</text>')
    parts.append(
        f'<text x="{LEFT + WIDTH}" y="{base}" text-anchor="end" '
        f"{TEXT}>{(end - begin) / 1e3:.0f} ms</text>"
    )
    for place, name in enumerate(names):
        x, y = LEFT + 128 * (place % 7), base + 16 + 24 * (place // 7)
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}" {TEXT}>{name}</text>')
    note = (
        "Pale: waiting for the slower rank (straggler time). Full colour: the exchange itself, "
        "compute stopped (exposed)."
    )
    parts.append(f'<text x="{LEFT}" y="{height - 12}" {TEXT}>{note}</text>')
    return close_svg(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--first", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    events, begin, end = load_events(options.run, options.first, options.steps)
    save(options.out, draw_steps(events, begin, end, options.title))


if __name__ == "__main__":
    main()
