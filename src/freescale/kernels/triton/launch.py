"""What all launches of Triton kernels share: a GPU or the interpreter, the right current device,
and sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


def require_gpu(device: torch.device, instead: str) -> None:
    """Refuses tensors that the kernels cannot read; `instead` names the reference to use."""
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(f"the Triton kernels need tensors on a GPU, not {device}; use {instead}")


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on the CPU."""
    from freescale.kernels.triton.rows_kernels import INTERPRETED

    return INTERPRETED


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def count_blocks(items: int, each: int) -> int:
    """How many blocks of `each` items hold `items`."""
    return -(-items // each)


def round_up_to_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class RowLaunch:
    """How a kernel over rows is launched."""

    elements: int  # of a program's tile, for each tensor that it reads or writes
    warps: int
    fewest_columns: int = 1

    def shape(self, width: int) -> dict[str, int]:
        """Arguments of a launch over rows of this width: tiles of R rows and W columns."""
        columns = max(self.fewest_columns, round_up_to_power_of_two(width))
        return {
            "WIDTH": width,
            "R": max(1, self.elements // columns),
            "W": columns,
            "num_warps": self.warps,
        }
