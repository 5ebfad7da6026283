"""Rows of a dynamic table on one rank: a storage of as many rows as there is room for, on the
device or behind a cache, and a directory that says which id each of them has.

    make_resident   decide (directory.py, device_directory.py), keep the rows that go, draw those
                    that come
    begin           the step of a batch begins: what was decided for it is no longer provisional
    roll_back       out with what is provisional; the next `begin` has it again
    looking_back    the state after an earlier batch, for copies of it

Decisions for the batches t and t+1 are made before the step of t is over. Each of them can be taken
back: a `_Decision` keeps the rows that it replaced. Schedules that train the same batches make the
same decisions, and whoever looks between two steps sees those of the steps that have begun.

Two rows behind the table's own belong to ids that have none: one is always zero and is read, the
other takes their gradients and is never read. Two, because one batch's gradients arrive while
another one reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import BatchFigures, Decided, Directory
from freescale.embedding.storage import Recorder, RowStorage, draw_initial_rows
from freescale.kernels.dispatch import fits_draws
from freescale.kernels.reference.row_sums import SortedRows
from freescale.kernels.triton.initial_rows import draw_rows
from freescale.random import derive, hash_name
from freescale.streams import current_stream

EXTRA_ROWS = 2  # of the storage, behind those of the table
_KEPT = 2  # decisions: of the batch that computes, and of the one after it


@dataclass(frozen=True)
class _Decision:
    """Of one batch."""

    changes: Any  # of the directory
    removed: Tensor | None  # entries that were swept
    slots: Tensor  # [m] of the rows that came
    rows: dict[str, Tensor]  # [m, ...] in their place in the other state


class DynamicStorage(RowStorage):
    """What `make_resident`, `read` and the exchange call local rows are keys of ids here."""

    keeps_slots = False

    def __init__(self, inner: RowStorage, directory: Directory | DeviceDirectory) -> None:
        """`inner`: has `EXTRA_ROWS` more than the table. A device directory is for rows that are at
        home on the device, whose slots are its entries."""
        (own,) = inner._ranges.values()
        self.spec, self.inner, self.directory = own.spec, inner, directory
        self.size, self.optimizer, self.changed = inner.size, inner.optimizer, inner.changed
        self.weight, self.state = inner.weight, inner.state
        self._ranges = inner._ranges
        self._zero, self._spent = inner.size - 2, inner.size - 1  # local rows
        self._slots: list[int] | None = None  # of these two
        self._seed, self._std = 0, 1.0
        self._table_seed: Tensor | None = None  # [1] on the device, once rows are drawn there
        self._decisions: deque[_Decision] = deque(maxlen=_KEPT)
        self._undone = 0  # the last ones of them
        self._begun = 0  # batches whose step has begun
        self.last_figures = BatchFigures(0, 0, 0, 0, 0, 0)
        self._lock = RLock()  # a lane decides while the main thread begins a step

    # ---- every step

    def make_resident(
        self, rows: Tensor, ledger: Recorder, counted: Tensor | None = None
    ) -> Tensor:
        """Slots [n] of keys [n]; those that are only not `counted` [n] do not get a row. Waits for
        the device: a host directory for the keys, a device directory for four numbers."""
        with self._lock:
            self._redo_all()
            with ledger.span("decide rows"):
                decided = self.directory.decide(rows, counted, absent=self._zero)
            slots, new = decided.entries, decided.new
            if decided.inserted is not None:
                extra = torch.arange(self._zero, self._spent + 1, device=rows.device)
                slots = self.inner.make_resident(torch.cat([slots, extra]), ledger)
                new = slots.index_select(0, decided.inserted).long()
                if self._slots is None:
                    # Of a cache, too: they are wanted in every batch and stay where they are.
                    self._slots = slots[-EXTRA_ROWS:].tolist()
            elif self._slots is None:
                self._slots = [self._zero, self._spent]
            with ledger.span("make rows"):
                self._insert(decided, new)
            self.last_figures = decided.figures
            for name, value in vars(decided.figures).items():
                ledger.count(f"dynamic_{name}", value)
            ledger.count("dynamic_rows", self.directory.used)
        return slots if decided.inverse is None else slots.index_select(0, decided.inverse)

    def _insert(self, decided: Decided, slots: Tensor) -> None:
        new = {
            name: value.new_zeros(slots.numel(), *value.shape[1:]) for name, value in self._parts
        }
        new["rows"] = self._draw(decided.new_ids)
        decision = _Decision(decided.changes, decided.removed, slots, new)
        self._exchange_rows(decision)
        self._decisions.append(decision)

    def _draw(self, ids: Tensor) -> Tensor:
        """Rows of ids [m], a function of (seed, table, id) alone."""
        plain = isinstance(self.directory, Directory) or self.spec.padding is not None
        if plain or not fits_draws(self.weight):
            return draw_initial_rows(self.spec, ids, self._seed, self._std)
        if self._table_seed is None:
            seed = derive(self._seed, hash_name(self.spec.name)).view(1)
            self._table_seed = seed.to(self.weight.device)
        return draw_rows(ids, self._table_seed, self.spec.width, self._std)

    @property
    def _parts(self) -> list[tuple[str, Tensor]]:
        return [("rows", self.weight), *self.state.items()]

    def _exchange_rows(self, decision: _Decision) -> None:
        if self.weight.is_cuda:  # lanes and the main thread exchange them in turn
            stream = current_stream(self.weight.device)
            for tensor in (decision.slots, decision.removed, *decision.rows.values()):
                if tensor is not None:
                    tensor.record_stream(stream)
        for name, value in self._parts:
            before = value.index_select(0, decision.slots)
            value.index_copy_(0, decision.slots, decision.rows[name])
            decision.rows[name] = before
        self.inner._mark(decision.slots)
        if decision.removed is not None:
            self.changed.mark(decision.removed.to(self.changed.device))

    def read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, width] of keys [n]; zeros for those that have none."""
        with self._lock:
            return self.inner.read(self.directory.find(rows, absent=self._zero), dtype)

    def update(
        self, slots: Tensor, gradients: Tensor, *, step: int, factor: float, clip: float | None
    ) -> None:
        self.inner.update(self._spend(slots), gradients, step=step, factor=factor, clip=clip)

    def update_readings(
        self, slots: SortedRows, gradients: Tensor, *, step: int, factor: float, clip: float | None
    ) -> None:
        slots = replace(slots, rows=self._spend(slots.rows))
        self.inner.update_readings(slots, gradients, step=step, factor=factor, clip=clip)

    def _spend(self, slots: Tensor) -> Tensor:
        """Gradients of the row that is read as zeros go to the one that is never read."""
        assert self._slots is not None
        zero, spent = self._slots
        return torch.where(slots == zero, spent, slots)

    # ---- what is provisional

    def begin(self) -> None:
        """The step of the next batch that was made resident begins. Waits for a lane that decides
        about another batch only if something was rolled back."""
        self._begun += 1
        if self._undone:
            with self._lock:
                while self.directory.batches < self._begun:
                    self._redo()

    def roll_back(self) -> None:
        """Takes back what was decided for steps that have not begun. `begin`, or the decision about
        another batch, makes it again."""
        with self._lock:
            while self.directory.batches > self._begun:
                self._undo()

    def restore_ahead(self) -> None:
        """What was rolled back is made again, by the caller's thread and stream."""
        with self._lock:
            self._redo_all()

    def drop_ahead(self) -> None:
        """Takes back what was decided for steps that have not begun: they will not come."""
        with self._lock:
            self.roll_back()
            while self._undone:
                self._decisions.pop()
                self._undone -= 1

    @property
    def begun(self) -> int:
        """Batches whose step has begun: what `looking_back` goes back to."""
        return self._begun

    @contextmanager
    def looking_back(self, batches: int) -> Iterator[None]:
        """The state after a number of batches, of the last two that were decided."""
        with self._lock:
            last = self.directory.batches
            while self.directory.batches > batches:
                self._undo()
            try:
                yield
            finally:
                self.directory.end_reading()
                while self.directory.batches < last:
                    self._redo()

    def _undo(self) -> None:
        self._undone += 1
        decision = self._decisions[-self._undone]
        self.directory.undo(decision.changes)
        self._exchange_rows(decision)

    def _redo(self) -> None:
        decision = self._decisions[-self._undone]
        self._undone -= 1
        self.directory.redo(decision.changes)
        self._exchange_rows(decision)

    def _redo_all(self) -> None:
        while self._undone:
            self._redo()

    # ---- all rows of this rank

    def initialise(self, name: str, seed: int, std: float) -> None:
        """Rows are drawn when their ids come."""
        self._seed, self._std, self._table_seed = seed, std, None

    def get_tensors(self, name: str) -> dict[str, Tensor]:
        """By position: rows that hold an id, and others, whose last use is -1."""
        return self.inner.get_tensors(name) | self.directory.get_tensors()

    def get_shard_tensors(self) -> dict[str, Tensor]:
        return self.directory.get_shard_tensors()

    def reload(self) -> None:
        self.inner.reload()
        self.directory.rebuild()
        self._decisions.clear()
        self._undone, self._begun = 0, self.directory.batches

    def get_ids(self, name: str) -> Tensor:
        """Ids [n] that have a row, in storage order."""
        held = self.directory.get_tensors()
        return held["ids"][held["last_use"] >= 0].to(self.weight.device)

    def list_rows(self, name: str) -> tuple[Tensor, Tensor]:
        rows = self.inner.get_tensors(name)["rows"]
        used = (self.directory.get_tensors()["last_use"] >= 0).nonzero().view(-1)
        return self.get_ids(name), rows.index_select(0, used.to(rows.device))
