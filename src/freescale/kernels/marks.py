"""Marks of changed rows, for up to eight consumers, each with a bit.

In C on a CPU: torch takes ten times as long to set some, and to find them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.native import NativeLibrary, address, load_native

ALL = 255  # bits of a row that has changed


def mark_rows(marks: Tensor, rows: Tensor) -> None:
    """Sets all bits of rows [n] int64, in any order and as often as they come, in marks [size]
    uint8; a row of -1 is the last one."""
    library = _find_library(marks)
    if library is None:
        marks.index_fill_(0, rows, ALL)
        return
    rows = rows.contiguous()
    assert rows.dtype == torch.int64
    library.mark_rows(rows.numel(), address(rows), marks.numel(), address(marks))


def find_marks(marks: Tensor, bit: int) -> Tensor:
    """The rows [n] int64 that have a bit set in marks [size], ascending."""
    library = _find_library(marks)
    if library is None:
        return marks.bitwise_and(bit).nonzero().view(-1)
    size, at = marks.numel(), address(marks)
    found = torch.empty(library.count_marks(size, at, bit), dtype=torch.int64)
    library.find_marks(size, at, bit, address(found))
    return found


def _find_library(marks: Tensor) -> NativeLibrary | None:
    assert marks.is_contiguous() and marks.dtype == torch.uint8
    return load_native() if marks.is_cpu else None
