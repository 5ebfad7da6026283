"""Marks of rows: which of them have changed, for up to eight who want to know, each with a bit."""

from __future__ import annotations

from torch import Tensor

ALL = 255  # bits of a row that has changed


def mark_rows(marks: Tensor, rows: Tensor) -> None:
    """Sets all bits of rows [n] int64, in any order and as often as they come, in marks [size]
    uint8; a row of -1 is the last one."""
    marks.index_fill_(0, rows, ALL)


def find_marks(marks: Tensor, bit: int) -> Tensor:
    """The rows [n] int64 that have a bit set in marks [size], ascending."""
    return marks.bitwise_and(bit).nonzero().view(-1)
