"""Marks of changed rows for up to eight consumers, a bit for each.

In C on a CPU: torch takes ten times as long to set marks and to find them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.native import address, load_native

ALL = 255  # the bits of a changed row


def mark_rows(marks: Tensor, rows: Tensor) -> None:
    """Sets all bits of rows [n] int64, which may repeat, in marks [size] uint8; a row of -1 is the
    last one."""
    assert marks.is_contiguous() and marks.dtype == torch.uint8
    library = load_native() if marks.is_cpu else None
    if library is None:
        marks.index_fill_(0, rows, ALL)
        return
    rows = rows.contiguous()
    assert rows.dtype == torch.int64
    library.mark_rows(rows.numel(), address(rows), marks.numel(), address(marks))


def find_marks(marks: Tensor, bit: int) -> Tensor:
    """The rows [n] int64 with a bit set in marks [size], ascending."""
    assert marks.is_contiguous() and marks.dtype == torch.uint8
    library = load_native() if marks.is_cpu else None
    if library is None:
        return marks.bitwise_and(bit).nonzero().view(-1)
    size, at = marks.numel(), address(marks)
    found = torch.empty(library.count_marks(size, at, bit), dtype=torch.int64)
    library.find_marks(size, at, bit, address(found))
    return found
