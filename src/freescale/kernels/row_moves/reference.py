"""Rows that come and those that go in their place, in plain torch. Initial rows are drawn by
embedding/storage.py."""

from __future__ import annotations

from torch import Tensor


def swap_rows(table: Tensor, slots: Tensor, kept: Tensor) -> None:
    """Exchanges different slots [m] of table [n, ...] with what was kept, [m or more, ...]."""
    kept = kept[: slots.numel()]
    before = table.index_select(0, slots)
    table.index_copy_(0, slots, kept)
    kept.copy_(before)
