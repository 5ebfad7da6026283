"""Sharded or replicated: decided per table before step 1, from its size and the ids of the first
batch.

The rule. A table is replicated when its rows and optimizer state take at most `BUDGET` bytes on
every rank and either they take at most `TINY` bytes or a rank's first batch reads at least `SHARE`
of its rows (mean over the ranks). Otherwise it is sharded.

Why. A replicated table costs one AllReduce of the whole table; a sharded one costs four dependent
exchanges of what is read. Where a quarter of a small table is read anyhow, the four waits are the
larger price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from freescale.embedding.layout import TableSpec
from freescale.embedding.optimizers import RowOptimizer

BUDGET = 64 << 20
TINY = 64 << 10
SHARE = 0.25

CHOICES = ("sharded", "replicated")


@dataclass(frozen=True)
class Placement:
    kind: str  # one of CHOICES
    reason: str


def count_state_bytes(optimizer: RowOptimizer, spec: TableSpec) -> int:
    """Bytes that the optimizer keeps beside each row."""
    shapes = optimizer.state_shapes(spec.width).values()
    return sum(torch.Size(shape).numel() for shape in shapes) * spec.dtype.itemsize


def choose_placement(
    spec: TableSpec, state_bytes_per_row: int, rows_read: float | None
) -> Placement:
    """Where a table lives, and why.

    Args:
        spec: the table.
        state_bytes_per_row: of its row optimizer.
        rows_read: distinct rows that a rank reads in a step, mean over ranks; None if unknown.
    """
    total = spec.rows * (spec.bytes_per_row + state_bytes_per_row)
    size = f"{total / 2**20:.1f} MiB with its optimizer state"
    if total <= TINY:
        return Placement("replicated", f"{size}: tiny")
    if total > BUDGET:
        return Placement("sharded", f"{size}: over {BUDGET >> 20} MiB")
    if rows_read is None:
        return Placement("sharded", f"{size}, and no batch seen")
    share = rows_read / spec.rows
    kind = "replicated" if share >= SHARE else "sharded"
    return Placement(kind, f"{size}, a rank reads {share:.0%} of its rows in a step")


def parse_placement(wanted: str | Mapping[str, str], names: list[str]) -> dict[str, str]:
    """The user's choice for each table that has one.

    Args:
        wanted: `auto`, one of CHOICES for all tables, or a mapping from table to choice.
        names: of all tables.

    Raises:
        ValueError: no such table or choice.
    """
    mapping = dict.fromkeys(names, wanted) if isinstance(wanted, str) else dict(wanted)
    for name, kind in mapping.items():
        if name not in names:
            raise ValueError(f"placement names a table {name!r}; the tables are {', '.join(names)}")
        if kind not in ("auto", *CHOICES):
            raise ValueError(
                f"placement of table {name!r} must be auto, sharded or replicated, not {kind!r}"
            )
    return {name: kind for name, kind in mapping.items() if kind != "auto"}
