"""What bench_priority.py measured: exposed communication over collisions and lengths, samples/s,
and two steps of it.

    .venv/bin/python benchmarks/figure_priority.py docs/figures/priority-trace.svg

draws the two steps, from a run on two hosts that it makes: it needs root and iproute2. The others
come from results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "peer")]

from drawing import (
    GREY,
    RED,
    SMALL,
    TEAL,
    Axes,
    Line,
    closed,
    opened,
    origin,
    panels,
    text,
    written,
)  # noqa: E402
from figure_simulate import over_collisions  # noqa: E402
from figure_step import COLOURS  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "priority-hosts.json"
Results = Mapping[str, Mapping[str, Any]]
INK = {"serial": GREY, "TorchRec": RED, "stale": TEAL, "staged": "#2f4b7c"}
NAMES = {
    "serial": "serial",
    "TorchRec": "TorchRec TrainPipelineSparseDist",
    "stale": "stale (inexact: the control)",
    "staged": "staged",
}
EMBEDDING = ("ids", "rows", "gradients")
TRACK, GAP, MARGIN, WIDTH = 30, 6, 92, 920


# ---- the curves


def line(rows: Sequence[dict], arm: str, figure: str, over: str) -> Line:
    """Medians of one arm, with bars from the 20th to the 80th percentile."""
    mine = sorted((row for row in rows if row["arm"].split()[0] == arm), key=lambda row: row[over])
    points = [(row[over], row[figure]["median"]) for row in mine]
    return Line(
        NAMES[arm],
        points,
        INK[arm],
        bars=[(row[over], row[figure]["p20"], row[figure]["p80"]) for row in mine],
    )


def curve(used: Results) -> str:
    """Over the collision rate."""
    rows = [row for row in used["priority-hosts"]["rows"] if row.get("sweep") == "collisions"]
    return panels(
        [
            _over(
                rows,
                "exposed_embedding_ms",
                "collisions",
                ("Exposed embedding communication, ms a step"),
                380,
            ),
            _over(rows, "samples_per_second", "collisions", "Samples/s", 380),
        ],
        used,
        note=(
            "Measured. Bars: 20th to 80th percentile. Charging counts and dense gradients to "
            "staged, too: docs/staged.md."
        ),
    )


def exposed(used: Results) -> str:
    """Over the collision rate and the history length as measured; over the collision rate on 256
    GPUs as predicted."""
    rows = [row for row in used["priority-hosts"]["rows"] if "collisions" in row]
    rates = [row for row in rows if row["sweep"] == "collisions"]
    # the sweep of lengths, and its middle from that of rates
    lengths = [row for row in rows if row["collisions"] == 10]
    simulated = over_collisions(used["simulate-paper"]["rows"])
    names = {"none": "serial, predicted", "all": "all techniques, predicted"}
    predicted = [replace(line, name=names[line.name]) for line in simulated.lines]
    axes = [
        _over(
            rates,
            "exposed_embedding_ms",
            "collisions",
            ("measured: exposed ids, rows and gradients, ms"),
            340,
        ),
        _over(rates, "exposed_all_ms", "collisions", "measured: exposed, all kinds, ms", 340),
        _over(lengths, "exposed_all_ms", "length", "measured: exposed, all kinds, ms", 340),
        replace(
            simulated,
            title="predicted, 256 GPUs: exposed, all kinds, ms",
            lines=predicted,
            wide=340,
        ),
    ]
    return panels(axes, used, columns=2)


def _over(rows: Sequence[dict], figure: str, over: str, title: str, wide: float) -> Axes:
    below = {
        "collisions": "requested rows that the batch before also reads, %",
        "length": "events of a history, 10 % collisions",
    }
    values = sorted({row[over] for row in rows})
    # 5 is too near to 0 and 10
    ticks = [(value, "" if value == 5 else f"{value}") for value in values]
    return Axes(
        title,
        below[over],
        ticks,
        [line(rows, arm, figure, over) for arm in INK],
        linear=True,
        wide=wide,
    )


# ---- the trace


def boxes(records: Sequence[dict], staged: bool) -> list[tuple[int, str, str, int, int]]:
    """(track, colour's name, label, begin, end) of everything a rank did in some steps. Tracks: 0
    main, 1 and 2 the network."""
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
            # the lanes hand over what they did, the urgent one last
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


def band(records: Sequence[dict], staged: bool, top: float, scale: float, title: str) -> list[str]:
    """Two steps of one rank, the second and third of four records: what a lane did is recorded in
    the step that waited for it."""
    begin, end = records[1]["begin"], records[2]["end"]
    tracks = ("main thread", "lane ahead", "lane urgent") if staged else ("main thread", "network")
    parts = [
        text(
            8, top - 10, f"{title}: {(end - begin) / 2e6:.0f} ms a step", more='font-weight="bold"'
        )
    ]
    for place, name in enumerate(tracks):
        y = top + place * (TRACK + GAP)
        parts.append(text(8, y + TRACK / 2 + 4, name))
        wide = (end - begin) * scale
        parts.append(
            f'<rect x="{MARGIN}" y="{y}" width="{wide:.1f}" height="{TRACK}" fill="#f4f4f4"/>'
        )
    labels: list[str] = []
    labelled: list[tuple[int, float, float]] = []
    for track, colour, label, a, b in sorted(
        boxes(records, staged), key=lambda box: box[3] - box[4]
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
        if staged and track:  # a lane works on one piece while others are under way
            work = colour not in EMBEDDING
            high, y = (TRACK / 3, y) if work else (2 * TRACK / 3, y + TRACK / 3)
        fill = "url(#stopped)" if colour == "wait" else COLOURS[colour]
        tip = f"<title>{label} {(b - a) / 1e6:.1f} ms</title>"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}" '
            f'fill="{fill}">{tip}</rect>'
        )
        half = 3.6 * len(label)
        middle = x + wide / 2
        # pieces overlap
        taken = any(
            place == track and abs(middle - other) < half + rest for place, other, rest in labelled
        )
        if wide > 2 * half and high > TRACK / 2 and colour != "wait" and not taken:
            labelled.append((track, middle, half))
            ink = 'style="fill:#fff"' if colour in ("forward", "backward", "gradients") else ""
            labels.append(text(middle, y + high / 2 + 4, label, "middle", ink))
    for edge in (begin, records[2]["begin"], end):
        x, bottom = MARGIN + (edge - begin) * scale, top + len(tracks) * (TRACK + GAP)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 5}" y2="{bottom}" stroke="#666" '
            'stroke-dasharray="3 3"/>'
        )
    return parts + labels


def typical(records: Sequence[dict]) -> Sequence[dict]:
    """Four consecutive records whose two in the middle last as long as such pairs mostly do."""
    lasts = [
        records[place + 2]["end"] - records[place + 1]["begin"] for place in range(len(records) - 3)
    ]
    usual = statistics.median_low(lasts)
    return records[lasts.index(usual) :][:4]


def trace() -> str:
    from hosts import hosts
    from priority_arms import SERIAL, STAGED
    from results import commit, describe_machine
    from workload import Workload

    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["workloads"]["unique ids"]
    workload = replace(Workload(**kept | {"hidden": tuple(kept["hidden"])}), collisions=0.1)
    with hosts(2) as network:
        measured = network.run("priority_arms:measure", workload, [SERIAL, STAGED], 1, 14)[0]
    picked = {name: typical(measured[name]["records"]) for name in (SERIAL, STAGED)}
    longest = max(records[2]["end"] - records[1]["begin"] for records in picked.values())
    scale = WIDTH / longest
    second = 46 + 2 * (TRACK + GAP) + 44
    height = second + 3 * (TRACK + GAP) + 86
    parts = opened(MARGIN + WIDTH + 20, height)
    parts.append(
        '<defs><pattern id="stopped" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)">'
    )
    parts.append(
        '<rect width="6" height="6" fill="#fff"/><line x1="0" y1="0" x2="0" y2="6" '
        'stroke="#d62728" stroke-width="3"/>'
    )
    parts.append("</pattern></defs>")
    parts += band(picked[SERIAL], False, 46, scale, "serial")
    parts += band(picked[STAGED], True, second, scale, "staged, 10 % collisions")
    base = second + 3 * (TRACK + GAP) + 14
    step = 100
    for value in range(0, int(longest / 1e6) + 1, step):
        x = MARGIN + value * 1e6 * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base - 12}" y2="{base - 6}" stroke="#999"/>'
        )
        parts.append(text(x, base + 8, f"{value} ms" if value == 0 else str(value), "middle"))
    shown = (
        "forward",
        "backward",
        "lookup",
        "update rows",
        "ids",
        "rows",
        "gradients",
        "dense",
        "counts",
        "wait",
    )
    for place, name in enumerate(shown):
        x, y = MARGIN + 86 * place + (18 if place > 3 else 0), base + 24
        fill = "url(#stopped)" if name == "wait" else COLOURS[name]
        parts.append(f'<rect x="{x}" y="{y}" width="13" height="13" fill="{fill}"/>')
        parts.append(text(x + 18, y + 11, "compute stopped" if name == "wait" else name))
    about = {
        "machine": describe_machine(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(),
    }
    parts.append(
        text(MARGIN, height - 8, f"Measured, one rank of two: {origin(about)}", style=SMALL)
    )
    return closed(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    written(parser.parse_args().out, trace())


if __name__ == "__main__":
    main()
