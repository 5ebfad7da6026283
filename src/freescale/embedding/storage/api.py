"""Rows in storage: the part of a group of tables that this rank holds, with their optimizer state.

A row has two numbers. Its *local row* is its place in the rank's part of the tables and never
changes. Its *slot* is where it lies on the device that computes, from `resolve` on, until the steps
that requested it have updated it: the same in device.py, a place in the cache in cached.py. In
dynamic.py rows come and go, and the key of an id takes the place of a local row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from freescale.embedding.changed_rows import ChangedRows
from freescale.embedding.layout import TableSpec, find_ids
from freescale.embedding.optimizers import RowOptimizer, RowWiseAdagrad, has_kernel
from freescale.kernels.dispatch.rows import (
    choose_optimizers,
    gather_rows,
    keeps_gradients,
    sum_sorted,
)
from freescale.kernels.row_sums.reference import SortedRows
from freescale.random import derive, hash_name, normal


class Recorder(Protocol):
    """A ledger, as storages see it."""

    def span(self, name: str) -> AbstractContextManager[None]: ...
    def count(self, name: str, value: float) -> None: ...


class UpdateOptions(TypedDict):
    """How a step updates rows, whenever its gradients arrive."""

    step: int  # that made the gradients, counted from 1
    factor: float  # of the learning rate
    clip: float | None  # largest norm of a row's gradient


class Counted(NamedTuple):
    """What a dynamic table counts of requested rows [n]: as of `RequestedIds`."""

    marks: Tensor | None = None
    draws: Tensor | None = None


class Resolved(NamedTuple):
    """Where requested rows are."""

    slots: Tensor  # [n]
    # [n] uint8: requests for ids without a row, which read the learned default row instead; None:
    # the table has no such row
    missing: Tensor | None = None
    log_q: Tensor | None = None  # [n] float32; None: the table does not count draws


@dataclass(frozen=True)
class TableRange:
    """Where a table is: its positions [first, last) are local rows from `base` on."""

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


class Storage(ABC):
    """Local storage of a group. Rows that are resident can be gathered and updated by their slots:
    weight [slots, width] and state tensors [slots, ...] on the device that computes."""

    weight: Tensor
    state: dict[str, Tensor]
    chunk_rows = 2048  # of `iterate_chunks`
    slots_are_rows = True  # a local row is its slot
    keeps_slots = True  # what is resident stays where it is when all rows are replaced
    may_fail = False  # `resolve` can fail on one rank alone: the ranks have to agree on it

    def __init__(
        self, ranges: list[TableRange], size: int, optimizer: RowOptimizer, device: torch.device
    ) -> None:
        """`size`: number of local rows; `device`: the one that computes."""
        self.size = size
        self._ranges = {each.spec.name: each for each in ranges}
        self.optimizer = optimizer
        self.changed = ChangedRows(size, device)

    def _allocate(self, count: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """Zeros for `count` rows, and for their state."""
        spec = next(iter(self._ranges.values())).spec
        shapes = self.optimizer.state_shapes(spec.width)
        return torch.zeros(count, spec.width, dtype=spec.dtype, device=device), {
            name: torch.zeros(count, *shape, dtype=spec.dtype, device=device)
            for name, shape in shapes.items()
        }

    # ---- every step

    @abstractmethod
    def resolve(self, rows: Tensor, ledger: Recorder, counted: Counted | None = None) -> Resolved:
        """Makes local rows [n] of a training batch resident: they keep their slots until two more
        batches are resolved, in training order. Runs on the caller's thread and stream."""

    def wait_for_rows(self) -> None:  # noqa: B027 - for rows that come and go
        """Waits until the rows that were resolved last are there, and what was decided about them
        is known. Needed before anything but `gather` reads them, and for other streams."""

    def describe(self, rows: Tensor) -> Tensor | None:
        """Marks [n] uint8 of local rows [n] that have no row and read the learned default row
        instead; None: the table has no such row. For reading alone: changes nothing."""
        return None

    @abstractmethod
    def read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Local rows [n] -> [n, width] on the device that computes, for reading alone."""

    def gather(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Slots [n] -> their rows [n, width]."""
        return gather_rows(self.weight, slots, dtype)

    def find_targets(self, slots: Tensor) -> Tensor:
        """The slots [n] that the gradients of what is read from slots [n] update."""
        return slots

    def update(self, slots: Tensor, gradients: Tensor, **options: Unpack[UpdateOptions]) -> None:
        """Unique slots [u], of `find_targets`, -1 for none, and their gradients [u, width]."""
        if options["clip"] is not None:
            gradients = choose_optimizers(self.weight).clip_rows(gradients, options["clip"])
        self._update(slots, gradients, options)

    def update_readings(
        self, slots: SortedRows, gradients: Tensor, **options: Unpack[UpdateOptions]
    ) -> None:
        """Slots, of `find_targets`, sorted, and the gradients [n, width] of all that read them:
        `update` by the sum of each row's, in one go if that gives the same bits."""
        is_row_wise = isinstance(self.optimizer, RowWiseAdagrad)
        if options["clip"] is None and self._has_kernel and not is_row_wise:
            self._update(slots, gradients, options)
        else:
            self.update(*sum_sorted(slots, gradients, self.weight), **options)

    def _update(
        self, slots: Tensor | SortedRows, gradients: Tensor, options: UpdateOptions
    ) -> None:
        """The rows are marked on the way if a kernel updates them."""
        given: dict[str, Any] = {"step": options["step"], "factor": options["factor"]}
        if self._has_kernel and self.slots_are_rows:
            given["marks"] = self.changed.marks
        else:
            self._mark(slots.rows if isinstance(slots, SortedRows) else slots)
        self.optimizer.update(self.weight, self.state, slots, gradients, **given)

    @property
    def _has_kernel(self) -> bool:
        """Whether the optimizer is one of ours, with a kernel that also marks rows and, if it
        works entry by entry, takes the place of a sum."""
        return has_kernel(self.optimizer) and keeps_gradients(self.weight)

    def _mark(self, slots: Tensor) -> None:
        """The rows in slots [n] are about to change."""
        self.changed.mark(slots)

    # ---- what was decided for steps that have not begun: nothing, unless rows come and go

    def begin(self, ledger: Recorder | None = None) -> None:  # noqa: B027
        """The step of the next resolved batch begins. `ledger`: of that step."""

    def roll_back(self) -> None:  # noqa: B027
        """From now on the rows read as after the last step that has begun."""

    def restore_ahead(self) -> None:  # noqa: B027
        """Restores what was rolled back."""

    def drop_ahead(self) -> None:  # noqa: B027
        """Forgets batches that were resolved and whose step has not begun: they come again."""

    @property
    def begun(self) -> int:
        """For `looking_back`: where the rows are now."""
        return 0

    def looking_back(self, begun: int) -> AbstractContextManager[None]:
        """The rows as they were when `begun` was read, but for updates."""
        return nullcontext()

    # ---- all rows of this rank: made, saved, loaded

    @abstractmethod
    def get_tensors(self, name: str) -> dict[str, Tensor]:
        """Views of a table's part: `rows` and its state, with every update made so far. Whoever
        writes to them calls `reload` afterwards."""

    def get_shard_tensors(self) -> dict[str, Tensor]:
        """As `get_tensors`: what a table's virtual shards hold besides rows, [shards, ...]."""
        return {}

    def reload(self) -> None:  # noqa: B027 - where views are the rows themselves, nothing is to do
        """The tensors of `get_tensors` were written to."""

    def get_range(self, name: str) -> TableRange:
        """Where a table is."""
        return self._ranges[name]

    def get_ids(self, name: str) -> Tensor:
        """Ids of a table's local rows, in storage order."""
        own = self._ranges[name]
        position = torch.arange(own.first, own.last, device=self.weight.device)
        return find_ids(position, own.spec.rows)

    def list_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """(ids [n], rows [n, width]) of a table's part."""
        return self.get_ids(name), self.get_tensors(name)["rows"]

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
        need its memory again. `reload` follows where they are written to."""
        own, rows = self._ranges[name], self.get_tensors(name)["rows"]
        size = self.chunk_rows
        for start in range(own.first, own.last, size):
            stop = min(start + size, own.last)
            ids = find_ids(torch.arange(start, stop, device=self.weight.device), own.spec.rows)
            yield ids, rows[start - own.first : stop - own.first]
