"""How much longer kernels take while NCCL or hostwire moves bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale_bench.common import drawing as svg
from freescale_bench.common.markdown import Results, single

HIGH = 11  # of a bar, including the gap below
DEFAULT, BEST = "nccl, as it is", "nccl, at the channel limit that slows least"


def find_arms(rows: list[Mapping[str, Any]]) -> dict[str, float]:
    """Returns % longer than alone for one compute: hostwire's arms, NCCL without a limit, and NCCL
    at its best setting."""
    found = {row["arm"]: row["slower_percent"] for row in rows if row["arm"].startswith("hostwire")}
    others = {
        row["arm"]: row["slower_percent"] for row in rows if not row["arm"].startswith("hostwire")
    }
    if others:
        found[BEST] = min(others.values())
    if "nccl" in others:
        found[DEFAULT] = others["nccl"]
    return found


def draw_overlap(used: Results) -> str:
    """Draws a group of bars per compute, and a bar per way to communicate."""
    result = single(used)
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if "slower_percent" in row and row["group"] in ("products", "layer"):
            cases.setdefault(row["case"], []).append(row)
    groups = {case: find_arms(rows) for case, rows in cases.items()}
    names = list(dict.fromkeys(arm for found in groups.values() for arm in found))
    ours = [name for name in names if name.startswith("hostwire")]
    inks = dict(zip(ours, (svg.BLUE, svg.TEAL, svg.GREY), strict=False)) | {
        BEST: svg.ORANGE,
        DEFAULT: svg.RED,
    }
    most = max([value for found in groups.values() for value in found.values()] + [1.0])
    left, top, wide = 24 + svg.LETTER * max(map(len, groups)), 40.0, 420.0
    parts = [
        svg.text(
            left, 22, "compute during AllToAlls: % longer than alone", more='font-weight="bold"'
        )
    ]
    for case, found in groups.items():
        parts.append(svg.text(left - 8, top + HIGH * len(found) / 2 + 3, case, "end"))
        for place, (arm, value) in enumerate(found.items()):
            y, long = top + HIGH * place, max(0.8, max(0.0, value) / most * wide)
            parts.append(svg.rect(left, y, long, HIGH - 2, inks[arm]))
            parts.append(svg.text(left + long + 5, y + 8.5, f"{value:+.1f} %", style=svg.SMALL))
        top += HIGH * len(found) + 12
    for arm in names:
        parts.append(svg.rect(left, top, 12, 9, inks[arm]))
        parts.append(svg.text(left + 18, top + 8.5, arm))
        top += 16
    note = (
        "Measured. Compute of about 30 ms during back-to-back AllToAlls of 32 MB; "
        "median over turns, mean of the ranks."
    )
    words, tall = svg.caption(left, top + 14, wide + 100, used, note)
    return svg.finish(
        [*svg.begin(max(left + wide + 120, svg.LEAST_WIDTH), top + 14 + tall), *parts, *words]
    )
