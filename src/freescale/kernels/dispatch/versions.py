"""Chooses between the versions of an operation: Triton on a GPU, C for small batches on a CPU if
there is a compiler, the reference in plain torch otherwise.

The model chooses once per batch, with its plan: the operations around the attention use the version
of the attention. For a table the choice depends on device, dtype and width alone.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from freescale.kernels.jit.launch import is_recording


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_on_gpu(device: torch.device) -> bool:
    """Whether to use versions for a GPU; always while launches are recorded."""
    return device.type == "cuda" or is_recording()


def runs_triton(device: torch.device) -> bool:
    """Whether to use Triton kernels: on a GPU, if Triton is installed."""
    return is_on_gpu(device) and has_triton()
