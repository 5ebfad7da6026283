"""What features add to quality, as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table
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
    conditions = f"{' and '.join(sorted(epochs))} epochs; means over seeds."
    head = ("data", "model", *_NAMES, "ndcg@10 with features (users drawn anew, 95 %)")
    return format_table(used, folder, head, rows, conditions=conditions)
