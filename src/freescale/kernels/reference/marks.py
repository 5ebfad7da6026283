"""Marks of rows: which of them have changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def mark_rows(marks: Sequence[Tensor], rows: Tensor) -> None:
    """Sets rows [n] int64, in any order and as often as they come, in each of some marks [size]
    bool; a row of -1 is the last one."""
    for each in marks:
        each.index_fill_(0, rows, True)


def find_marks(marks: Tensor) -> Tensor:
    """The rows [n] int64 that are set in marks [size], ascending."""
    return marks.nonzero().view(-1)
