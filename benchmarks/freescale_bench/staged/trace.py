"""Draws two consecutive steps, serial above staged, from a new run on two hosts:

    python -m freescale_bench.staged.trace docs/figures/staged-trace.svg

Needs root and iproute2, and the repository: the workload comes from its staged-hosts.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from freescale_bench.common import drawing as svg
from freescale_bench.common.hosts import open_hosts
from freescale_bench.common.results import describe_run, read_committed
from freescale_bench.common.turns import EMBEDDING
from freescale_bench.common.workload import Workload
from freescale_bench.staged.arms import SERIAL, STAGED, measure

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
TRACK, GAP, MARGIN, WIDTH = 30, 6, 92, 920


def list_boxes(
    records: Sequence[Mapping[str, Any]], staged: bool
) -> list[tuple[int, str, str, int, int]]:
    """Returns (track, colour's name, label, begin, end) of everything in a rank's records. Tracks:
    0 main thread, 1 and 2 network."""
    found = []
    for record in records:
        spans = [(name, a, b) for name, a, b in record["spans"] if name in COLOURS]
        found += [(0, name, name, a, b) for name, a, b in spans]
        if staged:
            found.append(
                (
                    0,
                    "wait",
                    "waits for 4 and 6",
                    *next((a, b) for name, a, b in record["spans"] if name == "arrive"),
                )
            )
        exchanges = [c for c in record["collectives"] if c[0] in EMBEDDING]
        for place, (kind, _, _, issued, waited, done) in enumerate(exchanges):
            # the records of the urgent lane come last
            urgent = staged and place >= len(exchanges) - 2
            # the stages of pipeline/staged.py; 1 and 2 both exchange ids
            stages = (
                {"gradients": 5, "rows": 6} if urgent else {"ids": 1, "gradients": 3, "rows": 4}
            )
            label = f"{stages[kind]} {kind}" if staged else kind
            found.append((2 if urgent else 1, kind, label, issued, done))
            if not staged:
                found.append((0, "wait", "waits", waited, done))
        others = [c for c in record["collectives"] if c[0] not in EMBEDDING]
        found += [(0, kind, kind, waited, done) for kind, _, _, _, waited, done in others]
        for name, a, b in record["spans"]:
            lane, _, work = name.partition("/")
            if work in COLOURS:
                found.append((1 + (lane == "urgent"), work, work, a, b))
    return found


def draw_band(
    records: Sequence[Mapping[str, Any]], staged: bool, top: float, scale: float, title: str
) -> list[str]:
    """Draws two steps of one rank, the second and third of four records: a lane's work is recorded
    in the step that waited for it."""
    begin, end = records[1]["begin"], records[2]["end"]
    tracks = ("main thread", "lane ahead", "lane urgent") if staged else ("main thread", "network")
    parts = [
        svg.text(
            8, top - 10, f"{title}: {(end - begin) / 2e6:.0f} ms a step", more='font-weight="bold"'
        )
    ]
    for place, name in enumerate(tracks):
        y = top + place * (TRACK + GAP)
        parts.append(svg.text(8, y + TRACK / 2 + 4, name))
        wide = (end - begin) * scale
        parts.append(svg.rect(MARGIN, y, wide, TRACK, "#f4f4f4"))
    labels: list[str] = []
    labelled: list[tuple[int, float, float]] = []
    for track, colour, label, a, b in sorted(
        list_boxes(records, staged), key=lambda box: box[3] - box[4]
    ):
        a, b = max(a, begin), min(b, end)
        if b <= a:
            continue
        x, y, wide = (
            MARGIN + (a - begin) * scale,
            top + track * (TRACK + GAP),
            max(0.7, (b - a) * scale),
        )
        high: float = TRACK
        if staged and track:  # a lane works while its messages are in flight
            work = colour not in EMBEDDING
            high, y = (TRACK / 3, y) if work else (2 * TRACK / 3, y + TRACK / 3)
        fill = "url(#stopped)" if colour == "wait" else COLOURS[colour]
        tip = f"{label} {(b - a) / 1e6:.1f} ms"
        parts.append(svg.rect(x, y, wide, high, fill, tip=tip))
        half = 3.6 * len(label)
        middle = x + wide / 2
        # labels must not overlap
        taken = any(
            place == track and abs(middle - other) < half + rest for place, other, rest in labelled
        )
        if wide > 2 * half and high > TRACK / 2 and colour != "wait" and not taken:
            labelled.append((track, middle, half))
            ink = 'style="fill:#fff"' if colour in ("forward", "backward", "gradients") else ""
            labels.append(svg.text(middle, y + high / 2 + 4, label, "middle", ink))
    for edge in (begin, records[2]["begin"], end):
        x, bottom = MARGIN + (edge - begin) * scale, top + len(tracks) * (TRACK + GAP)
        parts.append(svg.rule(x, top - 5, x, bottom, "#666", more='stroke-dasharray="3 3"'))
    return parts + labels


def choose_typical(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns four consecutive records whose middle pair has the median duration."""
    lasts = [
        records[place + 2]["end"] - records[place + 1]["begin"] for place in range(len(records) - 3)
    ]
    usual = statistics.median_low(lasts)
    return records[lasts.index(usual) :][:4]


def draw_trace() -> str:
    kept = read_committed("staged-hosts")["workloads"]["unique ids"]
    names = {field.name for field in fields(Workload)}  # earlier results have more fields
    settings = {name: value for name, value in kept.items() if name in names}
    settings |= {"hidden": tuple(kept["hidden"]), "collisions": 0.1}
    workload = Workload(**settings)
    with open_hosts(2) as network:
        measured = network.run(measure, workload, [SERIAL, STAGED], 1, 14)[0]
    picked = {name: choose_typical(measured[name]["records"]) for name in (SERIAL, STAGED)}
    longest = max(records[2]["end"] - records[1]["begin"] for records in picked.values())
    scale = WIDTH / longest
    second = 46 + 2 * (TRACK + GAP) + 44
    height = second + 3 * (TRACK + GAP) + 86
    parts = svg.begin(MARGIN + WIDTH + 20, height)
    parts.append(
        '<defs><pattern id="stopped" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#fff"/><line x1="0" y1="0" x2="0" y2="6" '
        'stroke="#d62728" stroke-width="3"/>'
        "</pattern></defs>"
    )
    parts += draw_band(picked[SERIAL], False, 46, scale, "serial")
    parts += draw_band(picked[STAGED], True, second, scale, "staged, 10 % collisions")
    base = second + 3 * (TRACK + GAP) + 14
    step = 100
    for value in range(0, int(longest / 1e6) + 1, step):
        x = MARGIN + value * 1e6 * scale
        parts.append(svg.rule(x, base - 12, x, base - 6, "#999"))
        parts.append(svg.text(x, base + 8, f"{value} ms" if value == 0 else str(value), "middle"))
    shown = ("forward", "backward", "lookup", "update rows", *EMBEDDING, "dense", "counts", "wait")
    for place, name in enumerate(shown):
        x, y = MARGIN + 86 * place + (18 if place > 3 else 0), base + 24
        fill = "url(#stopped)" if name == "wait" else COLOURS[name]
        parts.append(svg.rect(x, y, 13, 13, fill))
        parts.append(svg.text(x + 18, y + 11, "compute stopped" if name == "wait" else name))
    origin = f"Measured, one rank of two: {svg.describe_origin(describe_run())}"
    parts.append(svg.text(MARGIN, height - 8, origin, style=svg.SMALL))
    return svg.finish(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    svg.save(parser.parse_args().out, draw_trace())


if __name__ == "__main__":
    main()
