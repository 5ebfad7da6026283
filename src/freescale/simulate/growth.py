"""How a dynamic table grows: admitted ids, and the rows that fit into its shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freescale.embedding.dynamic_rules import Dynamic


@dataclass(frozen=True)
class Growth:
    """The state of a dynamic table after a number of steps."""

    steps: int
    admitted: float  # ids, including evicted ones
    rows: float  # rows with an id
    fill: float  # their share of the capacity
    row_bytes: float  # their bytes with optimizer state

    @property
    def evicts(self) -> bool:
        """Whether a thousandth of the ids found their shard full."""
        return self.rows < 0.999 * self.admitted


def predict_growth(
    rules: Dynamic, steps: Sequence[int], admitted: Sequence[float], row_bytes: int
) -> list[Growth]:
    """Predicts the rows of a table after each of `steps`, when `admitted` ids have occurred in
    enough batches; a row and its optimizer state take `row_bytes`."""
    found = []
    for count, ids in zip(steps, admitted, strict=True):
        rows = rules.shards * _fill_shard(ids / rules.shards, rules.shard_rows)
        found.append(Growth(count, ids, rows, rows / rules.rows, rows * row_bytes))
    return found


def _fill_shard(mean: float, room: int) -> float:
    """Expected rows of a shard that has room for `room`, if hashing gives it `mean` ids: Poisson
    distributed, approximated by a normal distribution."""
    if mean <= 0:
        return 0.0
    deviation = math.sqrt(mean)
    distance = (room - mean) / deviation
    below = 0.5 * math.erfc(-distance / math.sqrt(2))
    density = math.exp(-distance * distance / 2) / math.sqrt(2 * math.pi)
    return min(mean, room - ((room - mean) * below + deviation * density))


def describe_growth(name: str, rules: Dynamic, growth: Sequence[Growth], ranks: int) -> list[str]:
    """Lines for people."""
    if not growth:
        return []
    row = growth[-1].row_bytes / growth[-1].rows if growth[-1].rows else 0.0
    each = (rules.rows * row / ranks, (rules.map_bytes + rules.counter_bytes) / ranks)
    lines = [
        f"table {name}: {rules}, room for {rules.rows:,} rows: {each[0] / 1e9:,.2f} GB of a rank "
        f"with the state of their optimizer, and {each[1] / 1e9:,.2f} GB of host memory for ids; "
        "what deciding costs is not simulated"
    ]
    return lines + [
        f"table {name}: {one.rows:,.0f} rows after {one.steps:,} step{'s' * (one.steps > 1)}, "
        f"{one.fill:.1%} full, {one.row_bytes / ranks / 1e9:,.2f} GB of a rank"
        f"{'; rows are evicted' if one.evicts else ''}"
        for one in growth
    ]


def list_growth(growth: Sequence[Growth], ranks: int) -> list[dict[str, Any]]:
    """As plain data."""
    return [
        {
            "gpus": ranks,
            "steps": one.steps,
            "rows": one.rows,
            "fill_percent": 100 * one.fill,
            "bytes_per_rank": one.row_bytes / ranks,
            "evicts": one.evicts,
        }
        for one in growth
    ]
