"""Chooses the version of the checksums for this process: C if there is a compiler."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from freescale.kernels.checksums import native, reference
from freescale.kernels.checksums.reference import Words


class Checksums(Protocol):
    """The functions of `checksums.reference`."""

    def sum_blocks(self, value: Tensor) -> Words: ...
    def sum_file(self, file: int, place: int, size: int, threads: int = 1) -> Words: ...
    def copy_blocks(self, value: Tensor, into: Tensor) -> Words: ...
    def replace_rows(
        self, into: Tensor, sums: Words, rows: Tensor, source: Tensor, packed: bool = False
    ) -> None: ...


def choose_checksums() -> Checksums:
    return native if native.is_there() else reference
