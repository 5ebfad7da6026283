"""Memory for all rows of a shard that is not the device's: of the host, or a mapped file."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.embedding.host_tables.tiers import Disk, Tier, format_bytes
from freescale.pinning import pin

Shapes = Mapping[str, tuple[int, ...]]
Numbers = NDArray[np.int64]


class Home:
    """All rows and their state."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors  # by name, [rows, ...]

    def expect(self, *rows: Tensor) -> None:
        """These rows, each [n], will be read or written soon."""

    def pin(self) -> str:
        """Lets GPUs read and write it while it lives. Returns why not; empty if they can."""
        pinned: list[Callable[[], object]] = []
        for tensor in self.tensors.values():
            if not tensor.numel():
                continue
            try:
                pinned.append(pin(self, tensor.data_ptr(), tensor.nbytes))
            except RuntimeError as error:
                for unpin in pinned:
                    unpin()
                return str(error)
        # Before it is unpinned (the last to be registered is the first to be called): kernels may
        # be at it.
        weakref.finalize(self, torch.cuda.synchronize).atexit = False
        return ""


class MappedHome(Home):
    """In a file."""

    def __init__(self, tensors: dict[str, Tensor], mapped: mmap.mmap) -> None:
        super().__init__(tensors)
        self._mapped = mapped

    def expect(self, *rows: Tensor) -> None:
        """The disk gets all of their pages to read at once, instead of one page after another."""
        offset, ordered = 0, np.sort(torch.cat(rows).cpu().numpy())
        for tensor in self.tensors.values():
            width = tensor.nbytes // max(1, tensor.shape[0])
            for first, last in find_pages(ordered, offset, width):
                size = (last + 1 - first) * mmap.PAGESIZE
                self._mapped.madvise(mmap.MADV_WILLNEED, first * mmap.PAGESIZE, size)
            offset += tensor.nbytes

    def pin(self) -> str:
        return "it is a file"


def find_pages(rows: Numbers, offset: int, width: int) -> list[tuple[int, int]]:
    """(first, last) of runs of pages with rows [n], ascending, of `width` bytes from `offset`
    on."""
    if not rows.size or not width:
        return []
    first = (offset + rows * width) // mmap.PAGESIZE
    last = (offset + (rows + 1) * width - 1) // mmap.PAGESIZE
    begins = np.concatenate([[True], first[1:] > last[:-1] + 1])
    ends = np.concatenate([begins[1:], [True]])
    return list(zip(first[begins].tolist(), last[ends].tolist(), strict=True))


def open_home(tier: Tier, shapes: Shapes, dtype: torch.dtype, about: str) -> Home:
    """Zeros of these shapes, by name, in host memory or in a file that is mapped into it.
    ValueError if there is no room; `about` says whose rows they are."""
    if isinstance(tier, Disk):
        return _map_file(Path(tier.path), shapes, dtype, about)
    try:
        return Home({name: _allocate(shape, dtype) for name, shape in shapes.items()})
    except (OSError, RuntimeError) as error:  # the system's or torch's, for want of memory
        size = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        raise ValueError(
            f"{about}: {format_bytes(size)} of host memory cannot be had ({error}): use more "
            "ranks, or disk:FOLDER:CACHE"
        ) from None


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros. In large pages where the system has them: rows are read here and there, and with small
    ones a good part of the time goes to finding each."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # large pages are for such memory alone
    mapped = mmap.mmap(-1, count * dtype.itemsize, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype, count=count).view(shape)


def _map_file(folder: Path, shapes: Shapes, dtype: torch.dtype, about: str) -> Home:
    """The file is reserved in full, so that a disk cannot become full later, and has no name, so
    that nobody can cut it short: either would kill the process that has it mapped."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    total = sum(sizes.values()) * dtype.itemsize
    if not total:
        return Home({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, total)
            mapped = mmap.mmap(file.fileno(), total)  # keeps the file after it is closed
    except OSError as error:
        fix = "check the folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "make room there, or name a folder on a larger disk"
        raise ValueError(
            f"{about}: {format_bytes(total)} cannot be had in {folder} "
            f"({error.strerror or error}): {fix}"
        ) from None
    tensors, offset = {}, 0
    for name, shape in shapes.items():
        count = sizes[name]
        tensors[name] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(
            shape
        )
        offset += count * dtype.itemsize
    return MappedHome(tensors, mapped)
