"""Rows of a dynamic table on one rank: a storage of as many rows as there is room for, on the
device or behind a cache, and a directory that says which id each of them has.

    resolve         decide (dynamic/directory.py, dynamic/device_directory.py), keep the rows that
                    go, draw those that come
    wait_for_rows   if the device decides: the host waits until it knows how many came
    begin           the step of a batch begins: what was decided for it is no longer provisional
    roll_back       take back what is provisional; the next `begin` restores it
    looking_back    the state after an earlier batch, for copies of it

Schedules that train the same batches make the same decisions, and whoever looks between two steps
sees those of the steps that have begun (decisions.py).

Two rows behind the table's own belong to ids that have none: one is always zero and is read, the
other takes their gradients and is never read. Two, because one batch's gradients arrive while
another one reads. If a default row is learned, requesters request it with every batch. The owner
answers which of their ids have no row, and they read the default row for these: it travels,
collides and is updated like any other row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Unpack

import torch
from torch import Tensor

from freescale.embedding.dynamic.decisions import Decision, Decisions
from freescale.embedding.dynamic.device_directory import Deciding, DeviceDirectory
from freescale.embedding.dynamic.directory import BatchFigures, Decided, Directory
from freescale.embedding.dynamic.drawn_rows import DrawnRows
from freescale.embedding.dynamic.draws import DrawCounts
from freescale.embedding.dynamic_rules import DEFAULT_ID, LEARNED, SHARDS
from freescale.embedding.storage.api import (
    Counted,
    Recorder,
    Resolved,
    Storage,
    UpdateOptions,
    draw_initial_rows,
)
from freescale.kernels.dispatch.rows import choose_row_swap, fits_exchange
from freescale.kernels.row_sums.reference import SortedRows
from freescale.streams import current_stream

EXTRA_ROWS = 2  # of the storage, behind those of the table


class DynamicStorage(Storage):
    """What `resolve`, `read` and the exchange call local rows are keys of ids here."""

    keeps_slots = False

    def __init__(
        self,
        inner: Storage,
        directory: Directory | DeviceDirectory,
        draws: DrawCounts | None = None,
    ) -> None:
        """`inner`: has `EXTRA_ROWS` more than the table; its slots are the entries of a device
        directory. `draws`: of the same shards, if log-q is wanted."""
        self.draws = draws
        (own,) = inner._ranges.values()
        self.spec, self.inner, self.directory = own.spec, inner, directory
        self.size, self.optimizer, self.changed = inner.size, inner.optimizer, inner.changed
        self.weight, self.state = inner.weight, inner.state
        self._ranges = inner._ranges
        self.may_fail = inner.may_fail
        self._deciding_directory = directory if isinstance(directory, DeviceDirectory) else None
        self._has_default = self.spec.dynamic is not None and self.spec.dynamic.default == LEARNED
        self._zero, self._spent = inner.size - 2, inner.size - 1  # local rows
        self._slots: list[int] | None = None  # of these two
        self._seed, self._std = 0, 1.0
        self._drawn = DrawnRows(self.spec, self.weight, self.state)
        self._decisions = Decisions(directory, draws, self._exchange_rows)
        self._deciding: Deciding | None = None  # what the device decides about the last one
        self.last_figures = BatchFigures(0, 0, 0, 0, 0, 0)
        self._uncounted: deque[dict[str, int]] = deque()  # of batches whose step has not begun
        self._lock = RLock()  # a lane decides while the main thread begins a step

    # ---- every step

    def resolve(self, rows: Tensor, ledger: Recorder, counted: Counted | None = None) -> Resolved:
        """Keys [n]; those whose `marks` are all 0 do not get a row. A host directory waits for the
        keys; if the device decides, `wait_for_rows` waits, once the rows are needed."""
        marks, draws = counted or Counted()
        slots = self._decide(rows, ledger, marks)
        missing = log_q = None
        if self._has_default:
            assert self._slots is not None
            missing = (slots == self._slots[0]).to(torch.uint8)  # mask of keys without a row
        if self.draws is not None:
            drawn = torch.zeros_like(rows) if draws is None else draws
            log_q = self._count_draws(self.draws, rows, drawn)
        return Resolved(slots, missing, log_q)

    def _decide(self, rows: Tensor, ledger: Recorder, counted: Tensor | None) -> Tensor:
        """Slots [n] of keys [n]."""
        with self._lock:
            self.wait_for_rows()
            self._decisions.redo_all()
            if self._deciding_directory is not None and self._draws_in_place:
                with ledger.span("decide rows"):
                    return self._begin_deciding(self._deciding_directory, rows, counted)
            with ledger.span("decide rows"):
                decided = self.directory.decide(rows, counted, self._zero)
            slots, new = decided.entries, decided.new
            if decided.inserted is not None:
                extra = torch.arange(self._zero, self._spent + 1, device=rows.device)
                slots = self.inner.resolve(torch.cat([slots, extra]), ledger).slots
                new = slots.index_select(0, decided.inserted).long()
                if self._slots is None:
                    # Of a cache, too: they are wanted in every batch and stay where they are.
                    self._slots = slots[-EXTRA_ROWS:].tolist()
            elif self._slots is None:
                self._slots = [self._zero, self._spent]
            with ledger.span("make rows"):
                self._insert(decided, new)
            self._note(decided.figures)
        return slots if decided.inverse is None else slots.index_select(0, decided.inverse)

    def _begin_deciding(
        self, directory: DeviceDirectory, rows: Tensor, counted: Tensor | None
    ) -> Tensor:
        """The device decides, and begins to draw rows, while the host goes on."""
        deciding = directory.begin(rows, counted, self._zero)
        placed = deciding.placed.entries
        self._drawn.begin(placed, deciding.new_ids, deciding.total)
        self._slots = [self._zero, self._spent]
        self._decisions.add(Decision(None, None, placed, {}))
        self._deciding = deciding
        return deciding.entries

    def wait_for_rows(self) -> None:
        if self._deciding is None:
            return
        with self._lock:
            deciding = self._deciding
            if deciding is None:  # another thread was here
                return
            assert self._deciding_directory is not None
            decided, decision = self._deciding_directory.finish(deciding), self._decisions.last
            decision.changes, decision.removed = decided.changes, decided.removed
            decision.slots = decided.new
            decision.rows = self._drawn.end(decided.new, decided.new_ids)
            self._mark_exchanged(decision)
            self._note(decided.figures)
            self._deciding = None  # last: who finds it so does not ask for the lock

    def gather(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._drawn.early:
            self.wait_for_rows()
        # Before the host knows how many rows have come: the device has work while it waits.
        late, read = self._drawn.late, super().gather(slots, dtype)
        self.wait_for_rows()
        return read if late == self._drawn.late else super().gather(slots, dtype)

    def _note(self, figures: BatchFigures) -> None:
        """For the ledger: the decisions about a batch, and the table after them."""
        own, self.last_figures = self._ranges[self.spec.name], figures
        self._uncounted.append(
            {
                **{f"dynamic_{name}": value for name, value in vars(figures).items()},
                "dynamic_rows": self.directory.used,
                "dynamic_capacity": own.last - own.first,
            }
        )

    def _insert(self, decided: Decided, slots: Tensor) -> None:
        """The host has decided. On a GPU, rows are drawn where the ones that go were read."""
        decision = Decision(decided.changes, decided.removed, slots, {})
        if self._draws_in_place:
            decision.rows = self._drawn.end(slots, decided.new_ids)
            self._mark_exchanged(decision)
        else:
            decision.rows = {
                name: value.new_zeros(slots.numel(), *value.shape[1:])
                for name, value in self.state.items()
            }
            decision.rows["rows"] = draw_initial_rows(
                self.spec, decided.new_ids[: slots.numel()], self._seed, self._std
            )
            self._exchange_rows(decision)
        self._decisions.add(decision)

    def describe(self, rows: Tensor) -> Tensor | None:
        if not self._has_default:
            return None
        with self._lock:
            return (self.directory.find(rows, absent=self._zero) == self._zero).to(torch.uint8)

    def _count_draws(self, counts: DrawCounts, rows: Tensor, drawn: Tensor) -> Tensor:
        """Counts what keys [n] of the last resolved batch are worth as draws, [n] int64. Returns
        their log-q [n], with that of this batch."""
        with self._lock:
            self._decisions.redo_all()
            where = counts.sums.device
            keys = rows.to(where)
            self._decisions.last.draws = counts.add(keys, drawn.to(where))
            return counts.estimate(keys).to(rows.device)

    @property
    def _draws_in_place(self) -> bool:
        """Whether the kernels of a GPU draw the rows of this table: wherever they are at home and
        whoever decides, so that they have the same bits."""
        return self.spec.padding is None and fits_exchange(self.weight)

    def _exchange_rows(self, decision: Decision) -> None:
        if self.weight.is_cuda:  # lanes and the main thread exchange them in turn
            stream = current_stream(self.weight.device)
            for tensor in (decision.slots, decision.removed, *decision.rows.values()):
                if tensor is not None:
                    tensor.record_stream(stream)
        swap_rows = choose_row_swap(self.weight)
        for name, value in [("rows", self.weight), *self.state.items()]:
            swap_rows(value, decision.slots, decision.rows[name])
        self._mark_exchanged(decision)

    def _mark_exchanged(self, decision: Decision) -> None:
        self.inner._mark(decision.slots)
        if decision.removed is not None:
            self.changed.mark(decision.removed.to(self.changed.device))

    def read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, width] of keys [n]; zeros for those that have none."""
        with self._lock:
            self.wait_for_rows()
            if self._deciding_directory is not None and fits_exchange(self.weight):
                return self._deciding_directory.read(rows, self.weight, dtype, absent=self._zero)
            return self.inner.read(self.directory.find(rows, absent=self._zero), dtype)

    def update(self, slots: Tensor, gradients: Tensor, **options: Unpack[UpdateOptions]) -> None:
        self.inner.update(slots, gradients, **options)

    def update_readings(
        self, slots: SortedRows, gradients: Tensor, **options: Unpack[UpdateOptions]
    ) -> None:
        self.inner.update_readings(slots, gradients, **options)

    def find_targets(self, slots: Tensor) -> Tensor:
        """Gradients of the row that is read as zeros go to the one that is never read."""
        assert self._slots is not None
        zero, spent = self._slots
        return torch.where(slots == zero, spent, slots)

    # ---- what is provisional

    def begin(self, ledger: Recorder | None = None) -> None:
        """The next resolved batch's step begins. Waits for a lane only if it was rolled back."""
        # Counted here, not where it is decided: a lane may be late, and the ledger's step would
        # have the rows of two batches, and the one before it none.
        if not self._uncounted:
            self.wait_for_rows()
        figures = self._uncounted.popleft()
        if ledger is not None:
            for name, value in figures.items():
                ledger.count(name, value)
        self._decisions.begun += 1
        if self._decisions.undone:
            with self._lock:
                self._decisions.redo_until(self._decisions.begun)

    def roll_back(self) -> None:
        """Takes back what was decided for steps that have not begun, until it is needed."""
        with self._lock:
            self.wait_for_rows()
            self._decisions.undo_after(self._decisions.begun)

    def restore_ahead(self) -> None:
        """What was rolled back is made again, by the caller's thread and stream."""
        with self._lock:
            self.wait_for_rows()
            self._decisions.redo_all()

    def drop_ahead(self) -> None:
        """Takes back what was decided for steps that have not begun: they will not come."""
        with self._lock:
            self.wait_for_rows()
            self.roll_back()
            self._uncounted.clear()
            self._decisions.drop_undone()

    @property
    def begun(self) -> int:
        """Batches whose step has begun: what `looking_back` goes back to."""
        return self._decisions.begun

    @contextmanager
    def looking_back(self, batches: int) -> Iterator[None]:
        """The state after a number of batches, of the last two that were decided."""
        with self._lock:
            self.wait_for_rows()
            last = self.directory.batches
            self._decisions.undo_after(batches)
            try:
                yield
            finally:
                self.directory.end_reading()
                if self.draws is not None:
                    self.draws.end_reading()
                self._decisions.redo_until(last)

    # ---- all rows of this rank

    def initialise(self, name: str, seed: int, std: float) -> None:
        """Rows are drawn when their ids come."""
        self._seed, self._std = seed, std
        self._drawn.seed_with(seed, std)

    def get_tensors(self, name: str) -> dict[str, Tensor]:
        """By position: rows that hold an id, and others, whose last use is -1."""
        self.wait_for_rows()
        return self.inner.get_tensors(name) | self.directory.get_tensors()

    def get_shard_tensors(self) -> dict[str, Tensor]:
        """What shards hold besides rows, [shards, ...]: batches, counts of waiting ids, draws."""
        found = self.directory.get_shard_tensors()
        if self.draws is not None:
            assert self.spec.dynamic is not None
            parts = SHARDS // self.spec.dynamic.shards
            found["draws"] = self.draws.sums.view(-1, parts * self.draws.sums.shape[1])
        return found

    def reload(self) -> None:
        self.inner.reload()
        self.directory.rebuild()
        self._decisions.clear()
        self._uncounted.clear()

    def get_ids(self, name: str) -> Tensor:
        """Ids [n] that have a row, in storage order; without that of a learned default row."""
        ids = self.directory.get_tensors()["ids"]
        return ids.index_select(0, self._list_used()).to(self.weight.device)

    def _list_used(self) -> Tensor:
        held = self.directory.get_tensors()
        used = held["last_use"] >= 0
        if self._has_default:
            used &= held["ids"] != DEFAULT_ID
        return used.nonzero().view(-1)

    def list_rows(self, name: str) -> tuple[Tensor, Tensor]:
        rows = self.inner.get_tensors(name)["rows"]
        return self.get_ids(name), rows.index_select(0, self._list_used().to(rows.device))
