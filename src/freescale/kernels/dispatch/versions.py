"""Chooses between the versions of an operation: Triton on a GPU, C for small batches on a CPU if
there is a compiler, the reference in plain torch otherwise.

The model chooses once per batch, with its plan: the operations around the attention use the version
of the attention. For a table the choice depends on device, dtype and width alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from freescale.kernels.jit.launch import is_recording

Version = TypeVar("Version", covariant=True)


class Versions(Generic[Version]):
    """The versions of an operation, each a module with the same functions."""

    def __init__(self, reference: Version, *faster: tuple[Version, Callable[..., bool]]) -> None:
        """`faster`: versions with their conditions, the fastest first."""
        self._reference, self._faster = reference, faster

    def choose(self, *arguments: object) -> Version:
        """The first version whose condition holds for these arguments."""
        for version, fits in self._faster:
            if fits(*arguments):
                return version
        return self._reference


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_on_gpu(device: torch.device) -> bool:
    """Whether to use versions for a GPU; always while launches are recorded."""
    return device.type == "cuda" or is_recording()


def runs_triton(device: torch.device) -> bool:
    """Whether to use Triton kernels: on a GPU, if Triton is installed."""
    return is_on_gpu(device) and has_triton()
