"""What features add to quality and cost in preparation, as tables."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single
from freescale_bench.quality.table import format_figure

_NAMES = ("hr@10", "ndcg@10", "hr@10/cold")


def format_features(used: Results, folder: str) -> str:
    """Formats a row per arm and data set; the last column is the difference in NDCG@10."""
    rows, epochs = [], set()
    for result in used.values():
        more = result["comparison"]["ndcg@10"]
        difference = f"{more['percent']:+.0f} % ({more['low']:+.0f} to {more['high']:+.0f})"
        epochs.add(str(result["epochs"]))
        for row, last in zip(result["rows"], ("", difference), strict=True):
            figures = (format_figure(row[name]) for name in _NAMES)
            rows.append((result["name"].removeprefix("features-"), row["arm"], *figures, last))
    conditions = (
        f"{' and '.join(sorted(epochs))} epochs, with keep=best in the command the best of them on "
        "the validation part; means over seeds."
    )
    head = ("data", "model", *_NAMES, "ndcg@10 with features (users drawn anew, 95 %)")
    return format_table(used, folder, head, rows, conditions=conditions)


def format_preparation(used: Results, folder: str) -> str:
    """Formats a row per number of items and events; the note is the bound of the memory."""
    result = single(used)
    by_size: dict[tuple[int, int], list[str]] = {}
    for row in result["rows"]:
        figures = by_size.setdefault((row["items"], row["events"]), [])
        figures.append(f"{row['seconds']:,.0f} s, {row['peak_bytes'] / 1e9:.2f} GB")
    rows = [(f"{items:,}", f"{events:,}", *arms) for (items, events), arms in by_size.items()]
    head = ("items", "events", *(row["arm"] for row in result["rows"][:3]))
    _, item, event, more = result["claims"]
    alone, column = (row["seconds"] for row in result["rows"][-3:-1])
    note = (
        f"Of the last row: the features take {more['measured']:.0f} % of the time of the histories "
        f"alone, and the column of events {100 * (column / alone - 1):.0f} %. The memory of the "
        f"features grows by {item['measured']:.0f} bytes with each item, and by "
        f"{max(event['measured'], 0):.1f} with each event."
    )
    about = (
        "Time and peak memory of a process, about 0.3 GB of it for the libraries; single runs on a "
        "machine that other work shares. An item has a category, a brand, a price and up to five "
        "tags."
    )
    return format_table(used, folder, head, rows, note=note, conditions=about)
