"""The ladder: samples/s, waits and loss parity of TorchRec and of FreeScale with one technique more
on each rung."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from freescale_bench.common import drawing as svg
from freescale_bench.common.markdown import Results, single
from freescale_bench.ladder.rungs import FULL, PERMUTED, PRODUCT, SERIAL, SPARSE_DIST, explain_rungs

_EXACT = 1e-9  # relative loss difference at the start of the axis


def find_peer(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the row that rungs are compared with: SparseDist, else TorchRec's fastest."""
    peers = [row for row in rows if row["arm"].startswith("TorchRec")]
    named = [row for row in peers if row["arm"] == SPARSE_DIST]
    return (
        named[0]
        if named
        else max(peers, key=lambda row: row["samples_per_second"]["median"], default=None)
    )


def describe_conditions(result: Mapping[str, Any]) -> str:
    """Describes what was measured, from the result."""
    workload = result["workload"]
    first = result["rows"][0]
    ranks = first.get("ranks") or len(first["peak_memory_bytes_per_rank"])
    rate = result.get("rate") or ""
    cores = result["machine"]["cores"]
    hosts = (
        f"network namespaces of one machine of {cores} cores, {rate.removesuffix('mbit')} "
        "Mbit/s between them"
    )
    where = hosts if rate.endswith("mbit") else rate
    where = "sharing one GPU, NCCL over loopback sockets" if result["machine"]["gpu"] else where
    share = workload.get("collisions")
    data = (
        f"log-normal histories of median {workload['median_length']:g}, at most "
        f"{workload['maximum_length']}"
    )
    data += f", {100 * share:.0f} % collisions" if share is not None else ""
    parts = (
        f"{ranks} ranks",
        where,
        data,
        f"{workload['samples']} samples a rank",
        f"{workload['rows']:,} x {workload['width']} table",
    )
    return ", ".join(part for part in parts if part)


def find_median(row: Mapping[str, Any], figure: str) -> float | None:
    """Returns a median, or None if the arm lacks the figure (on a GPU the ledger records nothing of
    TorchRec)."""
    found = row.get(figure)
    return found["median"] if isinstance(found, Mapping) else found


def find_waits(row: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Returns milliseconds per step: exposed ids, rows and gradients; other exposed time;
    straggler."""
    embedding, everything, percent = (
        find_median(row, name)
        for name in ("exposed_embedding_ms", "exposed_all_ms", "straggler_percent")
    )
    if embedding is None or everything is None or percent is None:
        return None
    return embedding, max(0.0, everything - embedding), percent / 100 * row["step_ms"]["median"]


def make_label(arm: str) -> str:
    """Shortens the longest rung to what it adds, to fit next to a bar."""
    return arm.replace(f"{FULL}, ", "the same, ")


def choose_ink(arm: str) -> str:
    return (
        svg.RED
        if arm.startswith("TorchRec")
        else svg.BLUE
        if arm.startswith(FULL) or arm == PRODUCT
        else svg.TEAL
    )


def draw_ladder(used: Results) -> str:
    """Draws the ladder of one result."""
    result = single(used)
    rows = result["rows"]
    peer = find_peer(rows)
    left, wide = 226.0, 250.0

    def rate(row: Mapping[str, Any]) -> svg.Bar:
        value = row["samples_per_second"]
        times = f" ({value['median'] / peer['samples_per_second']['median']:.2f} x)" if peer else ""
        return svg.Bar(
            make_label(row["arm"]),
            value["median"],
            f"{value['median']:.0f}{times}",
            choose_ink(row["arm"]),
            value["p20"],
            value["p80"],
        )

    parts = svg.bars("samples/s", [rate(row) for row in rows], left, 36, wide)
    longest = max(sum(find_waits(row) or (0.0,)) for row in rows)
    parts += _draw_waits(rows, left + wide + 120, 36, 190, max(longest, 1e-9))
    below = 36 + 22 * len(rows) + 46
    parts += _draw_parity(result, left, below, wide)
    x, y = left + wide + 120, below
    for words, colour in (
        ("exposed: ids, rows, gradients", svg.RED),
        ("exposed: all else", svg.ORANGE),
        ("straggler", svg.GREY),
    ):
        parts.append(svg.rect(x, y, 12, 12, colour))
        parts.append(svg.text(x + 18, y + 10, words))
        y += 18
    shown = [name for name in result.get("parity", {}) if name != SERIAL] or [
        row["arm"] for row in rows if row["arm"] != SERIAL
    ]
    bottom = below + 22 * len(shown) + 46
    against = f"; x: times {peer['arm'].removeprefix('TorchRec ')}" if peer else ""
    note = (
        f"Measured: {describe_conditions(result)}. Medians, lines from the 20th to the 80th "
        f"percentile{against}."
    )
    blind = (
        ["On a GPU the ledger records nothing of TorchRec. SemiSync trains on stale rows."]
        if result["machine"]["gpu"]
        else []
    )
    below_it, tall = svg.caption(16, bottom, 820, used, note, *blind, explain_rungs(result))
    return svg.finish([*svg.begin(left + wide + 384, bottom + tall), *parts, *below_it])


def _draw_waits(
    rows: Sequence[Mapping[str, Any]], left: float, top: float, wide: float, most: float
) -> list[str]:
    """Draws stacked bars: what compute waited for in a step."""
    parts = [svg.text(left, top - 10, "compute waits, ms a step", more='font-weight="bold"')]
    parts.append(svg.rule(left, top - 3, left, top + 22 * len(rows), "#999"))
    for place, row in enumerate(rows):
        x, y = left, top + 22 * place
        found = find_waits(row)
        if found is None:
            parts.append(svg.text(x + 6, y + 12, "not recorded"))
            continue
        for value, colour in zip(found, (svg.RED, svg.ORANGE, svg.GREY), strict=True):
            long = value / most * wide
            parts.append(svg.rect(x, y, long, 15, colour))
            x += long
        parts.append(svg.text(x + 6, y + 12, f"{sum(found):.0f}"))
    return parts


def choose_parity(result: Mapping[str, Any]) -> str:
    """Returns which losses show parity: those of all steps. For `freescale train` the first, since
    rounding differences grow to a few percent within a few dozen steps."""
    names = {row["arm"] for row in result["rows"]}
    return "first_step" if PRODUCT in names else "largest"


def _draw_parity(result: Mapping[str, Any], left: float, top: float, wide: float) -> list[str]:
    """Draws relative loss differences to serial, on a logarithmic axis from 1e-9."""
    steps = choose_parity(result)
    found = result.get("parity") or {row["arm"]: row for row in result["rows"]}
    rows = []
    for name, row in found.items():
        if name == SERIAL:
            continue
        apart = row[f"{steps}_relative_loss_difference_to_serial"]
        label = f"{apart:.0e}" if apart else "0: every loss equal"
        rows.append(
            svg.Bar(
                make_label(name),
                math.log10(max(apart, _EXACT) / _EXACT),
                label,
                svg.GREY if name == PERMUTED else choose_ink(name),
            )
        )
    what = {"first_step": "relative difference of the first loss"}
    title = what.get(steps, "largest relative difference of a loss") + " to serial's (logarithmic)"
    return svg.bars(title, rows, left, top, wide * 0.7, most=6.0)
