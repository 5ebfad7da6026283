"""Draws what bench_priority.py measured, and two steps of it.

.venv/bin/python benchmarks/figure_priority.py curve docs/figures/priority.svg       # from its results
.venv/bin/python benchmarks/figure_priority.py trace docs/figures/priority-trace.svg # a run on two hosts; needs root and iproute2
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "peer")]

from figure_step import COLOURS, TEXT  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "priority-hosts.json"
INK = {"serial": "#7f7f7f", "TorchRec": "#e45756", "stale": "#72b7b2", "staged": "#2f4b7c"}
DASHES = {"serial": "7 4", "stale": "2 3"}
EMBEDDING = ("ids", "rows", "gradients")
PLOT, HIGH, LEFT, TOP = 380, 260, 64, 54
TRACK, GAP, MARGIN, WIDTH = 30, 6, 92, 920


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more} {TEXT}>{words}</text>'


def opened(width: float, height: float) -> list[str]:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    return [head, '<rect width="100%" height="100%" fill="#fff"/>']


# ---- the curve


def panel(rows: Sequence[dict], figure: str, title: str, left: float) -> list[str]:
    """One figure over the collision rate, a line per arm, bars from the 20th to the 80th percentile."""
    top = max(r[figure]["p80"] for r in rows)
    unit = next(step for step in (10, 20, 25, 50, 100, 200, 500, 1000) if top / step <= 6)
    scale = HIGH / (unit * -(-top // unit))

    def place(rate: float, value: float) -> tuple[float, float]:
        return left + rate / 100 * PLOT, TOP + HIGH - value * scale

    parts = [text(left, TOP - 18, title, more='font-weight="bold"')]
    for value in range(0, int(HIGH / scale) + 1, unit):
        x, y = place(0, value)
        parts.append(f'<line x1="{x}" x2="{x + PLOT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e6e6"/>')
        parts.append(text(x - 8, y + 4, str(value), "end"))
    for rate in sorted({r["collisions"] for r in rows}):
        x, y = place(rate, 0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#999"/>')
        if rate != 5:
            parts.append(text(x, y + 18, f"{rate} %", "middle"))
    parts.append(text(left + PLOT / 2, TOP + HIGH + 38, "requested rows that the batch before also reads", "middle"))
    for arm, ink in INK.items():
        mine = sorted((r for r in rows if r["arm"].split()[0] == arm), key=lambda r: r["collisions"])
        points = [place(r["collisions"], r[figure]["median"]) for r in mine]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f'stroke-dasharray="{DASHES[arm]}"' if arm in DASHES else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{ink}" stroke-width="2.5" {dashes}/>')
        for r, (x, y) in zip(mine, points, strict=True):
            ends = [place(0, r[figure][end])[1] for end in ("p20", "p80")]
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}" stroke="{ink}" stroke-opacity="0.5"/>'
            )
            tip = f"{r['arm']}, {r['collisions']} %: {r[figure]['median']:.1f}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{ink}"><title>{tip}</title></circle>')
    if figure == "exposed_embedding_ms":
        mine = sorted((r for r in rows if r["arm"] == "staged"), key=lambda r: r["collisions"])
        line = " ".join("{:.1f},{:.1f}".format(*place(r["collisions"], r["exposed_all_ms"]["median"])) for r in mine)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{INK["staged"]}" stroke-opacity="0.4" stroke-width="1.5"/>')
    return parts


def curve(results: dict) -> str:
    rows = [r for r in results["rows"] if r.get("sweep") == "collisions"]
    second = LEFT + PLOT + 90
    parts = opened(second + PLOT + 30, TOP + HIGH + 106)
    parts += panel(rows, "exposed_embedding_ms", "Exposed embedding communication, ms a step", LEFT)
    parts += panel(rows, "samples_per_second", "Samples/s", second)
    names = {
        "serial": "serial",
        "TorchRec": "TorchRec TrainPipelineSparseDist",
        "stale": "stale (inexact: the control)",
        "staged": "staged",
    }
    x = LEFT
    for arm, name in names.items():
        y = TOP + HIGH + 68
        dashes = f'stroke-dasharray="{DASHES[arm]}"' if arm in DASHES else ""
        parts.append(f'<line x1="{x}" x2="{x + 28}" y1="{y}" y2="{y}" stroke="{INK[arm]}" stroke-width="2.5" {dashes}/>')
        parts.append(text(x + 36, y + 4, name))
        x += 70 + 6.6 * len(name)
    note = "Thin: all that staged exposes, counts and dense gradients included. Bars: 20th to 80th percentile."
    parts.append(text(LEFT, TOP + HIGH + 92, note))
    return "\n".join([*parts, "</svg>"]) + "\n"


# ---- the trace


def boxes(records: Sequence[dict], staged: bool) -> list[tuple[int, str, str, int, int]]:
    """(track, colour's name, label, begin, end) of everything a rank did in some steps. Tracks: 0 main, 1 and 2 the network."""
    found = []
    for record in records:
        spans = [(name, a, b) for name, a, b in record["spans"] if name in COLOURS]
        found += [(0, name, name, a, b) for name, a, b in spans]
        if staged:
            found.append((0, "wait", "waits for d and f", *next((a, b) for name, a, b in record["spans"] if name == "arrive")))
        exchanges = [c for c in record["collectives"] if c[0] in EMBEDDING]
        for place, (kind, _, _, issued, waited, done) in enumerate(exchanges):
            urgent = staged and place >= len(exchanges) - 2  # the lanes hand over what they did, the urgent one last
            letter = {"gradients": "a", "rows": "d", "ids": "b"}[kind] if not urgent else {"gradients": "e", "rows": "f"}[kind]
            found.append((2 if urgent else 1, kind, f"{letter} {kind}" if staged else kind, issued, done))
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
    """Two steps of one rank, the second and third of four records: what a lane did is recorded in the step that waited for it."""
    begin, end = records[1]["begin"], records[2]["end"]
    tracks = ("main thread", "lane ahead", "lane urgent") if staged else ("main thread", "network")
    parts = [text(8, top - 10, f"{title}: {(end - begin) / 2e6:.0f} ms a step", more='font-weight="bold"')]
    for place, name in enumerate(tracks):
        y = top + place * (TRACK + GAP)
        parts.append(text(8, y + TRACK / 2 + 4, name))
        wide = (end - begin) * scale
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="{wide:.1f}" height="{TRACK}" fill="#f4f4f4"/>')
    labels: list[str] = []
    labelled: list[tuple[int, float, float]] = []
    for track, colour, label, a, b in sorted(boxes(records, staged), key=lambda box: box[3] - box[4]):
        a, b = max(a, begin), min(b, end)
        if b <= a:
            continue
        x, y, wide = MARGIN + (a - begin) * scale, top + track * (TRACK + GAP), max(0.7, (b - a) * scale)
        high: float = TRACK
        if staged and track:  # a lane works on one piece while others are under way
            work = colour not in EMBEDDING
            high, y = (TRACK / 3, y) if work else (2 * TRACK / 3, y + TRACK / 3)
        fill = "url(#stopped)" if colour == "wait" else COLOURS[colour]
        tip = f"<title>{label} {(b - a) / 1e6:.1f} ms</title>"
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}" fill="{fill}">{tip}</rect>')
        half = 3.6 * len(label)
        middle = x + wide / 2
        taken = any(place == track and abs(middle - other) < half + rest for place, other, rest in labelled)  # pieces overlap
        if wide > 2 * half and high > TRACK / 2 and colour != "wait" and not taken:
            labelled.append((track, middle, half))
            ink = 'style="fill:#fff"' if colour in ("forward", "backward", "gradients") else ""
            labels.append(text(middle, y + high / 2 + 4, label, "middle", ink))
    for edge in (begin, records[2]["begin"], end):
        x, bottom = MARGIN + (edge - begin) * scale, top + len(tracks) * (TRACK + GAP)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 5}" y2="{bottom}" stroke="#666" stroke-dasharray="3 3"/>')
    return parts + labels


def typical(records: Sequence[dict]) -> Sequence[dict]:
    """Four consecutive records whose two in the middle last as long as such pairs mostly do."""
    lasts = [records[place + 2]["end"] - records[place + 1]["begin"] for place in range(len(records) - 3)]
    usual = statistics.median_low(lasts)
    return records[lasts.index(usual) :][:4]


def trace() -> str:
    from dataclasses import replace

    from hosts import hosts
    from priority_arms import SERIAL, STAGED
    from workload import Workload

    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["workloads"]["unique ids"]
    workload = replace(Workload(**kept | {"hidden": tuple(kept["hidden"])}), collisions=0.1)
    with hosts(2) as network:
        measured = network.run("priority_arms:measure", workload, [SERIAL, STAGED], 1, 14)[0]
    picked = {name: typical(measured[name]["records"]) for name in (SERIAL, STAGED)}
    longest = max(records[2]["end"] - records[1]["begin"] for records in picked.values())
    scale = WIDTH / longest
    second = 46 + 2 * (TRACK + GAP) + 44
    height = second + 3 * (TRACK + GAP) + 66
    parts = opened(MARGIN + WIDTH + 20, height)
    parts.append('<defs><pattern id="stopped" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">')
    parts.append('<rect width="6" height="6" fill="#fff"/><line x1="0" y1="0" x2="0" y2="6" stroke="#d62728" stroke-width="3"/>')
    parts.append("</pattern></defs>")
    parts += band(picked[SERIAL], False, 46, scale, "serial")
    parts += band(picked[STAGED], True, second, scale, "staged, 10 % collisions")
    base = second + 3 * (TRACK + GAP) + 14
    step = 100
    for value in range(0, int(longest / 1e6) + 1, step):
        x = MARGIN + value * 1e6 * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base - 12}" y2="{base - 6}" stroke="#999"/>')
        parts.append(text(x, base + 8, f"{value} ms" if value == 0 else str(value), "middle"))
    shown = ("forward", "backward", "lookup", "update rows", "ids", "rows", "gradients", "dense", "counts", "wait")
    for place, name in enumerate(shown):
        x, y = MARGIN + 86 * place + (18 if place > 3 else 0), base + 24
        fill = "url(#stopped)" if name == "wait" else COLOURS[name]
        parts.append(f'<rect x="{x}" y="{y}" width="13" height="13" fill="{fill}"/>')
        parts.append(text(x + 18, y + 11, "compute stopped" if name == "wait" else name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=("curve", "trace"))
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    drawn = curve(json.loads(RESULTS.read_text(encoding="utf-8"))) if options.picture == "curve" else trace()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
