"""The exchange of rows, in plain torch. embedding/storage.py draws initial rows."""

from __future__ import annotations

from torch import Tensor


def swap_rows(table: Tensor, slots: Tensor, kept: Tensor) -> None:
    """Exchanges distinct slots [m] of table [n, ...] with the rows `kept` [m or more, ...]."""
    kept = kept[: slots.numel()]
    before = table.index_select(0, slots)
    table.index_copy_(0, slots, kept)
    kept.copy_(before)
