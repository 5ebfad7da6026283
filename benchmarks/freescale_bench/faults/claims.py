"""Targets of the storms, and whether runs survived exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale_bench.common.results import Claim, at_least, at_most

Row = Mapping[str, Any]  # of a result: one storm
_ROUNDING = 1e-12  # relative rounding of float64 per step, if the number of ranks changes


def changes_ranks(row: Row) -> bool:
    return bool(row.get("fewest", row["world"]) < row["world"])


def is_exact(row: Row) -> bool:
    """Whether a run through a storm equals the undisturbed one: to the bit, or within rounding if
    the number of ranks changed."""
    if row["lost_samples"] + row["doubled_samples"] + row["other_batches"]:
        return False
    if changes_ranks(row):
        differences = (row["loss_difference_a_step"], row["difference"] / row["steps"])
        return all(each <= _ROUNDING for each in differences)
    return bool(row["bits_equal"] and row["losses_equal"])


def make_claims(rows: Sequence[Row], target: int | None = None) -> list[Claim]:
    """Makes the claims of all storms. `target`: faults (default: those of ten runs)."""

    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    faults = total("faults")
    where = ""
    if all(row["hosts"] > 1 for row in rows):
        where = " over two hosts"
    elif all(row.get("device") == "cuda" for row in rows):
        where = ", ranks on GPUs"
    elif all(row.get("start", "forked") != "forked" for row in rows):
        where = ", ranks started by freescale train and torchrun"
    spent = sum(row["seconds"] - row["undisturbed_seconds"] for row in rows)
    same = [row for row in rows if not changes_ranks(row)]
    changing = [row for row in rows if changes_ranks(row)]
    claims = [
        at_least(
            "faults survived without a hang, all kinds mixed, in seeded runs" + where,
            target or 1000,
            faults,
            "faults",
        ),
        at_most(
            "samples that a run lost or trained twice",
            0,
            total("lost_samples") + total("doubled_samples"),
            "samples",
        ),
        at_least(
            "runs whose final tables, row state, weights and optimizer state, and all losses, are "
            "those of the undisturbed run to the bit",
            len(same),
            sum(is_exact(row) for row in same),
            "runs",
        ),
    ]
    if changing:
        claims.append(
            at_least(
                "runs on another number of ranks after each fault, in float64, whose losses and "
                "final state are those of the undisturbed run within 1e-12 a step",
                len(changing),
                sum(is_exact(row) for row in changing),
                "runs",
            )
        )
    if not where:  # torchrun's own delays and Python's start are only reported in rows
        each = spent / max(1, faults)
        claims.append(at_most("seconds per fault", 3.0, each, "s"))
    return claims
