"""Marks of rows on a CPU, in C: torch takes ten times as long to set some, and to find them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freescale.kernels.native.bindings import (
    address,
    list_addresses,
    load_native,
    require_native,
)


def is_there(device: torch.device) -> bool:
    """Whether there are functions for marks there."""
    return device.type == "cpu" and load_native() is not None


def mark_rows(marks: Sequence[Tensor], rows: Tensor) -> None:
    """As the reference."""
    rows = rows.contiguous()
    size = marks[0].numel()
    assert rows.dtype == torch.int64 and all(each.numel() == size for each in marks)
    require_native().mark_rows(rows.numel(), address(rows), size, len(marks), list_addresses(marks))


def find_marks(marks: Tensor) -> Tensor:
    """As the reference."""
    assert marks.is_contiguous() and marks.dtype == torch.bool
    library = require_native()
    found = torch.empty(library.count_marks(marks.numel(), address(marks)), dtype=torch.int64)
    library.find_marks(marks.numel(), address(marks), address(found))
    return found
