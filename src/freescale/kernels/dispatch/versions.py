"""Chooses between the versions of an operation: Triton on a GPU, C for small batches on a CPU if
there is a compiler, the reference in plain torch otherwise.

For the model this is decided once per batch, with its plan: the operations around the attention run
where the attention runs. For a table it depends on device, dtype and width alone.
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
    """The versions of an operation: modules with the same functions."""

    def __init__(self, reference: Version, *faster: tuple[Version, Callable[..., bool]]) -> None:
        """`faster`: versions with their conditions, the fastest first."""
        self._reference, self._faster = reference, faster

    def choose(self, *given: object) -> Version:
        """The first version whose condition holds for what is `given`."""
        for version, fits in self._faster:
            if fits(*given):
                return version
        return self._reference


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_on_gpu(device: torch.device) -> bool:
    """Whether versions for a GPU are wanted. While launches are recorded, they always are."""
    return device.type == "cuda" or is_recording()


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels are wanted and can be had."""
    return is_on_gpu(device) and has_triton()
