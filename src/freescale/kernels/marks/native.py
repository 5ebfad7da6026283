"""Marks of rows on a CPU, in C: torch takes ten times as long to set some, and to find them."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.native import address, load_native, require_native


def is_there(device: torch.device) -> bool:
    """Whether there are functions for marks there."""
    return device.type == "cpu" and load_native() is not None


def mark_rows(marks: Tensor, rows: Tensor) -> None:
    """As the reference."""
    rows = rows.contiguous()
    assert rows.dtype == torch.int64 and marks.dtype == torch.uint8 and marks.is_contiguous()
    require_native().mark_rows(rows.numel(), address(rows), marks.numel(), address(marks))


def find_marks(marks: Tensor, bit: int) -> Tensor:
    """As the reference."""
    assert marks.is_contiguous() and marks.dtype == torch.uint8
    library = require_native()
    size, at = marks.numel(), address(marks)
    found = torch.empty(library.count_marks(size, at, bit), dtype=torch.int64)
    library.find_marks(size, at, bit, address(found))
    return found
