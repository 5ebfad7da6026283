"""Rows in memory: the part of a group of tables that this rank holds, with the optimizer state of
each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from freescale.embedding.layout import TableSpec, ids_at
from freescale.embedding.optimizers import RowOptimizer
from freescale.kernels.dispatch import choose_optimizers
from freescale.random import derive, hash_name, normal

_CHUNK_ROWS = 2048


@dataclass(frozen=True)
class Segment:
    """A table's place in the local storage: local rows [base, base + last - first) are its
    positions [first, last)."""

    spec: TableSpec
    base: int
    first: int
    last: int

    @property
    def slice(self) -> slice:
        return slice(self.base, self.base + self.last - self.first)


def initial_rows(spec: TableSpec, ids: Tensor, seed: int, std: float) -> Tensor:
    """Rows [n, width] of a table, a function of (seed, table, row) alone."""
    keys = derive(derive(seed, hash_name(spec.name)).to(ids.device), ids)
    columns = torch.arange(spec.width, device=ids.device)
    rows = normal(derive(keys[:, None], columns), spec.dtype).mul_(std)
    if spec.padding is not None:
        rows[ids == spec.padding] = 0
    return rows


class Rows:
    """Local storage of a group: weight [size, width] and state tensors [size, ...]."""

    def __init__(
        self, segments: list[Segment], size: int, optimizer: RowOptimizer, device: torch.device
    ) -> None:
        spec = segments[0].spec
        self.segments = {segment.spec.name: segment for segment in segments}
        self.optimizer = optimizer
        self.weight = torch.zeros(size, spec.width, dtype=spec.dtype, device=device)
        self.state = {
            name: torch.zeros(size, *shape, dtype=spec.dtype, device=device)
            for name, shape in optimizer.state_shapes(spec.width).items()
        }

    def ids(self, name: str) -> Tensor:
        """Ids of a table's local rows, in storage order."""
        segment = self.segments[name]
        position = torch.arange(segment.first, segment.last, device=self.weight.device)
        return ids_at(position, segment.spec.rows)

    def initialise(self, name: str, seed: int, std: float) -> None:
        spec = self.segments[name].spec
        for ids, part in self.chunks(name):
            part.copy_(initial_rows(spec, ids, seed, std))

    def copy_from(self, name: str, weight: Tensor) -> None:
        """Takes the rows of a whole table [rows, width]."""
        for ids, part in self.chunks(name):
            part.copy_(weight.detach()[ids.to(weight.device)])

    def chunks(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, view of their rows), some rows at a time: what is made of a whole table must not
        need its memory again."""
        segment = self.segments[name]
        for start in range(segment.first, segment.last, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, segment.last)
            ids = ids_at(torch.arange(start, stop, device=self.weight.device), segment.spec.rows)
            place = segment.base + start - segment.first
            yield ids, self.weight[place : place + stop - start]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Views of a table's part: `rows` and its state, for checkpoints."""
        part = self.segments[name].slice
        return {"rows": self.weight[part]} | {key: value[part] for key, value in self.state.items()}

    def update(
        self, rows: Tensor, gradients: Tensor, *, step: int, factor: float, clip: float | None
    ) -> None:
        """Unique local rows [u] and their summed gradients [u, width]; on a GPU a row of -1 is
        none."""
        if clip is not None:
            gradients = choose_optimizers(self.weight).clip_rows(gradients, clip)
        self.optimizer.update(self.weight, self.state, rows, gradients, step=step, factor=factor)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be had on this device: on the host, the smaller of free memory and the
    container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1 << 62
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
