"""Memory for all rows of a shard that is not the device's: of the host, or a mapped file."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from freescale.embedding.host_tables.tiers import Disk, Tier, format_bytes

Shapes = Mapping[str, tuple[int, ...]]


def open_home(tier: Tier, shapes: Shapes, dtype: torch.dtype, about: str) -> dict[str, Tensor]:
    """Zeros of these shapes, by name, in host memory or in a file that is mapped into it.

    Args:
        about: whose rows they are, for errors.

    Raises:
        ValueError: there is no room.
    """
    if isinstance(tier, Disk):
        return _map_file(Path(tier.path), shapes, dtype, about)
    try:
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    except RuntimeError as error:  # torch's, for memory that cannot be had
        size = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        raise ValueError(
            f"{about}: {format_bytes(size)} of host memory cannot be had ({error}): use more "
            "ranks, or disk:FOLDER:CACHE"
        ) from None


def _map_file(folder: Path, shapes: Shapes, dtype: torch.dtype, about: str) -> dict[str, Tensor]:
    """The file is reserved in full, so that a disk cannot become full later, and has no name, so
    that nobody can cut it short: either would kill the process that has it mapped."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    total = sum(sizes.values()) * dtype.itemsize
    if not total:
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, total)
            mapped = mmap.mmap(file.fileno(), total)  # keeps the file after it is closed
    except OSError as error:
        mend = "check the folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            mend = "make room there, or name a folder on a larger disk"
        raise ValueError(
            f"{about}: {format_bytes(total)} cannot be had in {folder} "
            f"({error.strerror or error}): {mend}"
        ) from None
    tensors, offset = {}, 0
    for name, shape in shapes.items():
        count = sizes[name]
        tensors[name] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(
            shape
        )
        offset += count * dtype.itemsize
    return tensors
