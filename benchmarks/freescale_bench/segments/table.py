"""Quality with segments, and the work of a request, as tables."""

from __future__ import annotations

from statistics import fmean

from freescale_bench.common.markdown import Results, format_rows, format_table, single

_NAMES = {"retail": "Online Retail II", "generated": "generated: long-lived tastes"}


def format_segments(used: Results, folder: str) -> str:
    rows = single(used)["rows"]
    recall: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["part"] == "quality":
            recall.setdefault((row["data"], row["arm"]), []).append(row["recall@10"])
    quality = [
        (
            _NAMES[row["data"]],
            f"{fmean(recall[row['data'], 'full']):.3f}",
            f"{fmean(recall[row['data'], 'segments']):.3f}",
            f"{row['mean']:+.1f} % ({row['low']:+.1f} to {row['high']:+.1f})",
        )
        for row in rows
        if row["part"] == "interval"
    ]
    seeds = max(len(values) for values in recall.values())
    head = ("Recall@10", "full sequence", "segments", f"difference, 95 % over {seeds} seeds")
    requests = {(r["setting"], r["arm"]): r for r in rows if r["part"] == "requests"}
    work = []
    for setting in dict.fromkeys(setting for setting, _ in requests):
        full, short = requests[setting, "full"], requests[setting, "segments, compressed before"]
        work.append(
            (
                setting,
                f"{full['operations'] / short['operations']:.1f} times fewer",
                f"{full['ms']['median'] / short['ms']['median']:.1f} times faster",
            )
        )
    first = format_rows(head, quality)
    second = format_table(
        used, folder, ("a request, recent events with a memory", "operations", "time"), work
    )
    return f"{first}\n\n{second}"
