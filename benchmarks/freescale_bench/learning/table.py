"""What each default is worth, as a table."""

from __future__ import annotations

import statistics

from freescale_bench.common.markdown import Results, format_table, single

METRICS = ("hr@10/unseen", "ndcg@10/unseen", "hr@10", "ndcg@10")


def format_learning(used: Results, folder: str) -> str:
    result = single(used)
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in result["rows"]):
        mine = [row for row in result["rows"] if row["arm"] == arm]
        means = (statistics.mean(row[name] for row in mine) for name in METRICS)
        rows.append((arm, *(f"{mean:.3f}" for mean in means)))
    seeds = len({row["seed"] for row in result["rows"]})
    about = result["training"]
    conditions = (
        f"{result['dataset']['name']}, validation part, {about['epochs']} epochs, histories of up "
        f"to {about['max_length']} events, mean of {seeds} seed{'s' if seeds > 1 else ''}."
    )
    return format_table(used, folder, ("", *METRICS), rows, conditions=conditions)
