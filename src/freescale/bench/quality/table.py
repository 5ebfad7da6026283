"""Quality of a default run, as a table."""

from __future__ import annotations

from freescale.bench.common.markdown import Results, format_table, single

# of all metrics that a file holds
_SHOWN = ("hr@1", "hr@10", "hr@50", "ndcg@10", "mrr", "hr@10/unseen", "ndcg@10/unseen")


def format_quality(used: Results, folder: str) -> str:
    result = single(used)
    names = [name for name in result["rows"][0] if name in _SHOWN]
    rows = [(row["arm"], *(f"{row[name]:.3f}" for name in names)) for row in result["rows"]]
    training = f"{result['training']['settings']}, {result['training']['steps']} steps"
    conditions = f"{result['dataset']['name']}, {training}."
    return format_table(used, folder, ("", *names), rows, conditions=conditions)
