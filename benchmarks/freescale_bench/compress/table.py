"""What thresholding saves and what it costs, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from freescale_bench.common.markdown import Results, format_number, format_table, single

_INTERVAL = "95 % interval includes 0: "


def format_compress_hosts(used: Results, folder: str) -> str:
    result = single(used)
    arms = {(row["configuration"], row["arm"]): row for row in result["rows"]}
    name = next(where for where, arm in arms if arm == "dense AllReduce")
    whole, thresholded = arms[name, "dense AllReduce"], arms[name, "thresholded"]
    fewer = arms[name, "times fewer"]
    rows = [
        ("step", *_milliseconds(whole["step_ms"], thresholded["step_ms"])),
        ("compute", *_milliseconds(whole["compute_ms"], thresholded["compute_ms"])),
        (
            "exposed dense communication",
            *_milliseconds(whole["exposed_dense_ms"], thresholded["exposed_dense_ms"]),
        ),
        *(
            (text, "", f"{fewer[key]:.1f} times fewer")
            for text, key in (
                (
                    "entries of its gradient that a rank sends",
                    "entries_of_its_gradient_a_rank_sends",
                ),
                ("entries that leave a rank, returned sums included", "entries_that_leave_a_rank"),
                ("bytes that leave a rank, positions included", "bytes_that_leave_a_rank"),
            )
        ),
    ]
    exchange = "exchange of activations"
    kept, cut = arms[exchange, "whole rows"], arms[exchange, "thresholded"]
    rows.append((exchange, *_milliseconds(kept["exchange_ms"], cut["exchange_ms"])))
    return format_table(used, folder, ("", "whole", "thresholded"), rows)


def _milliseconds(*times: float | Mapping[str, float]) -> tuple[str, ...]:
    return tuple(f"{t['median'] if isinstance(t, Mapping) else t:,.0f} ms" for t in times)


def format_compress_quality(used: Results, folder: str) -> str:
    result = single(used)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "hr@10" in row:
            found.setdefault((row["dataset"], row["arm"]), []).append(row)
    datasets = list(dict.fromkeys(data for data, _ in found))
    arms = list(dict.fromkeys(arm for _, arm in found))
    intervals = {
        entry["claim"].removeprefix(_INTERVAL): entry["measured"]
        for entry in result["claims"]
        if entry["claim"].startswith(_INTERVAL)
    }

    def show(data: str, arm: str) -> str:
        mean = f"{fmean(row['hr@10'] for row in found[data, arm]):.3f}"
        interval = intervals.get(f"HR@10 of {arm} against exact, relative, {data}")
        return mean if interval is None else f"{mean} ({format_number(interval, 2)} %)"

    rows = [
        (
            data,
            f"{fmean(row['popularity_hr@10'] for row in found[data, arms[0]]):.3f}",
            *(show(data, arm) for arm in arms),
        )
        for data in datasets
    ]
    seeds = len({row["seed"] for row in result["rows"] if "seed" in row})
    note = f"In brackets: 95 % interval of the relative difference to exact, over {seeds} seeds."
    return format_table(used, folder, ("HR@10", "popularity", *arms), rows, note=note)
