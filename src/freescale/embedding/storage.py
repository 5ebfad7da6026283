"""Rows in memory: the part of a group of tables that this rank holds, with the optimizer state of
each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from freescale.embedding.changed_rows import ChangedRows
from freescale.embedding.layout import TableSpec, find_ids
from freescale.embedding.optimizers import SGD, Adagrad, Adam, RowOptimizer
from freescale.kernels.dispatch import choose_optimizers, keeps_gradients, sum_sorted
from freescale.kernels.reference.row_sums import SortedRows
from freescale.random import derive, hash_name, normal

_CHUNK_ROWS = 2048


class UpdateOptions(TypedDict):
    """How a step updates rows, whenever its gradients arrive."""

    step: int  # that made the gradients, counted from 1
    factor: float  # of the learning rate
    clip: float | None  # largest norm of a row's gradient


@dataclass(frozen=True)
class TableRange:
    """Where a table is in the local storage: local rows [base, base + last - first) are its
    positions [first, last)."""

    spec: TableSpec
    base: int
    first: int
    last: int

    @property
    def slice(self) -> slice:
        return slice(self.base, self.base + self.last - self.first)


def draw_initial_rows(spec: TableSpec, ids: Tensor, seed: int, std: float) -> Tensor:
    """Rows [n, width] of a table, a function of (seed, table, row) alone."""
    keys = derive(derive(seed, hash_name(spec.name)).to(ids.device), ids)
    columns = torch.arange(spec.width, device=ids.device)
    rows = normal(derive(keys[:, None], columns), spec.dtype).mul_(std)
    if spec.padding is not None:
        rows[ids == spec.padding] = 0
    return rows


class RowStorage:
    """Local storage of a group: weight [size, width] and state tensors [size, ...]."""

    def __init__(
        self, ranges: list[TableRange], size: int, optimizer: RowOptimizer, device: torch.device
    ) -> None:
        spec = ranges[0].spec
        self._ranges = {each.spec.name: each for each in ranges}
        self.optimizer = optimizer
        self.weight = torch.zeros(size, spec.width, dtype=spec.dtype, device=device)
        self.state = {
            name: torch.zeros(size, *shape, dtype=spec.dtype, device=device)
            for name, shape in optimizer.state_shapes(spec.width).items()
        }
        self.changed = ChangedRows(size, device)

    def get_range(self, name: str) -> TableRange:
        """Where a table is."""
        return self._ranges[name]

    def get_ids(self, name: str) -> Tensor:
        """Ids of a table's local rows, in storage order."""
        own = self._ranges[name]
        position = torch.arange(own.first, own.last, device=self.weight.device)
        return find_ids(position, own.spec.rows)

    def initialise(self, name: str, seed: int, std: float) -> None:
        spec = self._ranges[name].spec
        for ids, part in self.iterate_chunks(name):
            part.copy_(draw_initial_rows(spec, ids, seed, std))

    def copy_from(self, name: str, weight: Tensor) -> None:
        """Takes the rows of a whole table [rows, width]."""
        for ids, part in self.iterate_chunks(name):
            part.copy_(weight.detach()[ids.to(weight.device)])

    def iterate_chunks(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, view of their rows), some rows at a time: what is made of a whole table must not
        need its memory again."""
        own = self._ranges[name]
        for start in range(own.first, own.last, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, own.last)
            ids = find_ids(torch.arange(start, stop, device=self.weight.device), own.spec.rows)
            place = own.base + start - own.first
            yield ids, self.weight[place : place + stop - start]

    def get_tensors(self, name: str) -> dict[str, Tensor]:
        """Views of a table's part: `rows` and its state, for checkpoints."""
        part = self._ranges[name].slice
        return {"rows": self.weight[part]} | {key: value[part] for key, value in self.state.items()}

    def update(
        self, rows: Tensor, gradients: Tensor, *, step: int, factor: float, clip: float | None
    ) -> None:
        """Unique local rows [u] and their summed gradients [u, width]; on a GPU a row of -1 is
        none."""
        if clip is not None:
            gradients = choose_optimizers(self.weight).clip_rows(gradients, clip)
        self.changed.mark(rows)
        self.optimizer.update(self.weight, self.state, rows, gradients, step=step, factor=factor)

    def update_readings(
        self, rows: SortedRows, gradients: Tensor, *, step: int, factor: float, clip: float | None
    ) -> None:
        """Local rows, sorted, and the gradients [n, width] of all that read them: `update` by the
        sum of each row's. In one go where that gives the same bits."""
        optimizer = self.optimizer
        if clip is None and isinstance(optimizer, (SGD, Adagrad, Adam)) and self._sums_on_the_way:
            self.changed.mark(rows.rows)
            optimizer.update(self.weight, self.state, rows, gradients, step=step, factor=factor)
            return
        numbers, sums = sum_sorted(rows, gradients)
        self.update(numbers, sums, step=step, factor=factor, clip=clip)

    @property
    def _sums_on_the_way(self) -> bool:
        """Whether the optimizer takes the place of a sum: one of ours that works entry by entry."""
        ours = type(self.optimizer).update in (SGD.update, Adagrad.update, Adam.update)
        return ours and keeps_gradients(self.weight)
