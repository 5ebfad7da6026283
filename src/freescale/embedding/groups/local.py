"""A group of tables on a single rank: nothing is exchanged, and the model reads the table itself.

    request   where the ids are in the local storage, their rows being resident from then on
    fetch     the model can read the rows, with all updates up to then
    collect   sum the gradients of each row
    update    update it

On a GPU nothing of it reads the device: the number of different rows stays there. Both the rows of
a sharded group, whose only shard this is, and those of a replicated one can be used in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.dynamic.directory import mark_any
from freescale.embedding.layout import Layout, ShardLayout, TableSpec
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.request import GroupIds, Index, RequestedIds, list_ids
from freescale.embedding.rows import FetchedRows, Rows, sum_readings
from freescale.embedding.storage.api import Counted, Storage, TableRange, UpdateOptions
from freescale.embedding.storage.device import DeviceStorage
from freescale.kernels.dispatch.requests import deduplicate
from freescale.kernels.dispatch.rows import (
    gather_rows,
    keeps_gradients,
    read_rows,
    select_marked_rows,
)
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.rows.gradients import RowGradients
from freescale.transport.api import Transport

# rows, and a gradient for each; or all readings, with those of a row side by side
Collected = tuple[Tensor | SortedRows, Tensor]
FindRows = Callable[[int, Tensor], Tensor]  # local rows [...] of a table's ids [...]


class LocalRows(Rows, Protocol):
    """The rows that a step reads."""

    def collect(self) -> Collected:
        """The gradients of what has read the rows."""


class LocalRequest(Protocol):
    """Rows that are resident for a step."""

    def open(self) -> LocalRows:
        """The rows are as the last step left them: from now on they can be read."""

    def list_tensors(self) -> list[Tensor]:
        """All tensors, for streams other than the one that made them."""


class InPlaceRows:
    """Rows that are read in the table itself."""

    def __init__(
        self,
        given: GroupIds,
        rows: Tensor,
        storage: Storage,
        find_rows: FindRows,
        slots: Tensor | None = None,
        log_q: Tensor | None = None,
    ) -> None:
        """rows [n]: local rows of the given ids; slots [n]: where these are in the storage's table
        [slots, width], if that is not by their numbers; log_q [n], if the table counts draws."""
        self._local = rows if slots is not None else None
        rows = rows if slots is None else slots
        self.index, self.slots = Index(rows[:0], given, rows), rows
        self._storage, self._find_rows, self.log_q = storage, find_rows, log_q
        self._table = storage.weight
        self._gradients = RowGradients(self.index.parts, self._table)
        self._copy: _Copy | None = None  # for what reads rows without `read`

    def open(self) -> InPlaceRows:
        return self

    def locate(self, table: int, ids: Tensor) -> tuple[int | None, Tensor, Tensor | None]:
        known = self.index.find_known(table, ids)
        if known is not None:
            return *known, None
        return None, *self.find(self._find_rows(table, ids))

    def read(self, part: int | None, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return read_rows(self._table, index, self._gradients, part, dtype)

    def offer(self, part: int | None, index: Tensor) -> tuple[Tensor, Tensor]:
        """As `Rows.offer`, of a copy of the rows of the step: all of their gradient will exist."""
        if self._copy is None:
            self._copy = _Copy(self._table, self.index, self.slots)
        if part is not None:
            return self._copy.rows, self._copy.index.parts[part].view(index.shape)
        return self._copy.rows, self._copy.find(index)

    def find_log_q(self, table: int, ids: Tensor) -> Tensor | None:
        if self.log_q is None:
            return None
        known = self.index.find_known(table, ids)
        if known is not None:
            sizes = [each.numel() for each in self.index.parts]
            return torch.split(self.log_q, sizes)[known[0]].view(ids.shape)
        assert self._local is not None  # a table that counts draws is dynamic
        return self.log_q[_find_reading(self._local.sort(), self._find_rows(table, ids))]

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Local rows [...] -> (where they are in the table, whether the step reads them)."""
        if self._local is None:
            return rows, torch.isin(rows, self.slots)
        if not self._local.numel():
            return torch.zeros_like(rows), torch.zeros_like(rows, dtype=torch.bool)
        reading = _find_reading(self._local.sort(), rows)
        return self.slots[reading].to(rows.dtype), self._local[reading] == rows

    def collect(self) -> Collected:
        copied = self._copy
        if copied is not None and copied.rows.grad is not None:
            # those that were read in the table, by their places in the copy
            gradients = self._gradients.move(copied.index.parts, copied.find)
            sums = sum_readings(gradients, copied.rows.grad, copied.rows.shape[0])
            return self._storage.find_targets(copied.slots), sums
        rows, values = self._gradients.take()
        return SortedRows.of(self._storage.find_targets(rows)), values

    def list_tensors(self) -> list[Tensor]:
        return [each for each in (self.slots, self._local, self.log_q) if each is not None]


class _Copy:
    """A copy of the rows that a step reads. How many are different stays on the device: there are
    as many as ids, or as the table has, the last ones without meaning."""

    def __init__(self, table: Tensor, index: Index, slots: Tensor) -> None:
        """slots [n] of all readings."""
        nowhere = torch.zeros(0, dtype=torch.int64, device=slots.device)
        found = deduplicate(slots, nowhere)
        self.slots = found.keys[: table.shape[0] + 1]  # -1, which names no row, may be one
        self.index = index.replace_parts(self.slots, found.inverse)
        self.rows = gather_rows(table, self.slots).requires_grad_(True)
        self._read, self._places = slots, found.inverse  # [n]: where each reading is in the copy
        self._sorted: tuple[Tensor, Tensor] | None = None  # readings, once they are searched

    def find(self, slots: Tensor) -> Tensor:
        """Where slots [...] of the table are in the copy: through any reading of the same row,
        because how many of the copy's rows have a meaning is not known here."""
        if not self._read.numel():
            return torch.zeros_like(slots)
        if self._sorted is None:
            self._sorted = self._read.sort()
        return self._places[_find_reading(self._sorted, slots)]


def _find_reading(ordered: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    """Where wanted values [...] are in a tensor, which is given sorted: (values, order)."""
    values, order = ordered
    place = torch.searchsorted(values, wanted.to(values.dtype))
    return order[place.clamp_(max=values.numel() - 1)]


class CopiedRows(FetchedRows):
    """Rows that are read in a copy: they are rounded, or no kernel keeps the gradients of reads."""

    def __init__(self, request: CopyRequest, rows: Tensor) -> None:
        super().__init__(request.index, rows, request.find_rows, train=True, log_q=request.log_q)
        self._request = request

    def collect(self) -> Collected:
        storage = self._request.storage
        gradient = self.pop_gradient().to(self._request.encoding).to(storage.weight.dtype)
        return storage.find_targets(self._request.slots), gradient


@dataclass(frozen=True)
class CopyRequest:
    """Resident rows that will be copied."""

    index: Index
    slots: Tensor  # [u] of the index's keys
    log_q: Tensor | None  # [u]; None: the table does not count draws
    storage: Storage
    encoding: torch.dtype  # to which rows and gradients are rounded
    find_rows: FindRows

    def open(self) -> CopiedRows:
        rows = self.storage.gather(self.slots, self.encoding)
        return CopiedRows(self, rows.to(self.storage.weight.dtype))

    def list_tensors(self) -> list[Tensor]:
        found = [self.index.keys, *self.index.parts, self.slots]
        return found + ([self.log_q] if self.log_q is not None else [])


class LocalGroup:
    """A group whose rows are all here."""

    def __init__(self, layout: Layout, rows: Storage, encoding: torch.dtype) -> None:
        """`encoding`: rows and gradients are rounded to it, as if they travelled."""
        assert layout.world == 1
        self.layout, self.rows, self._encoding = layout, rows, encoding

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> LocalRequest:
        """The rows that some (micro-)batches read become resident."""
        given, weight = list_ids(batches, self.layout.specs), self.rows.weight
        if keeps_gradients(weight) and self._encoding == weight.dtype:
            request: LocalRequest = self._request_in_place(given, transport)
        else:
            request = self._request_copy(given, transport)
        self.rows.wait_for_rows()  # the model reads them, on its own stream
        return request

    def _request_in_place(self, given: RequestedIds, transport: Transport) -> InPlaceRows:
        rows = self.layout.list_rows(given.ids, self.rows.weight.device)
        found = self.rows.resolve(rows, transport.ledger, Counted(given.marks, given.draws))
        slots = found.slots
        if found.missing is not None and slots.numel():  # the default row is that of the last id
            slots = torch.where(found.missing.bool(), slots[-1], slots)
        apart = None if slots is rows else slots
        return InPlaceRows(given.ids, rows, self.rows, self.layout.find_rows, apart, found.log_q)

    def _request_copy(self, given: RequestedIds, transport: Transport) -> CopyRequest:
        none = torch.zeros(0, dtype=torch.int64, device=self.rows.weight.device)
        parts = [self.layout.find_rows(table, ids.reshape(-1)) for table, ids in given.ids]
        unique, inverse = torch.unique(torch.cat([none, *parts]), return_inverse=True)
        marks = draws = None
        if given.marks is not None:
            marks = mark_any(given.marks, inverse, unique.numel())
        if given.draws is not None:
            draws = torch.zeros_like(unique).index_add_(0, inverse, given.draws)
        found = self.rows.resolve(unique, transport.ledger, Counted(marks, draws))
        index = Index(unique, given.ids, inverse)
        if found.missing is not None:
            index = index.redirect(found.missing.bool())
        find_rows = self.layout.find_rows
        return CopyRequest(index, found.slots, found.log_q, self.rows, self._encoding, find_rows)

    def fetch(self, request: LocalRequest, transport: Transport, train: bool = True) -> LocalRows:
        """The step of these rows begins, and the model can read them."""
        self.rows.begin(transport.ledger)
        return request.open()

    def collect(self, rows: LocalRows, transport: Transport) -> Collected:
        return rows.collect()

    def update(
        self, collected: Collected, transport: Transport, **options: Unpack[UpdateOptions]
    ) -> None:
        rows, gradients = collected
        if isinstance(rows, SortedRows):
            self.rows.update_readings(rows, gradients, **options)
        else:
            self.rows.update(rows, gradients, **options)


@dataclass(frozen=True)
class MarkedRequest:
    """The rows that this rank reads in a step."""

    index: Index
    marks: Tensor  # [size]: 1 for rows that are read, 0 for others, in the dtype of the rows


class ReplicatedRows(FetchedRows):
    """The whole tables."""

    def __init__(
        self, layout: ShardLayout, request: MarkedRequest, rows: Tensor, *, train: bool
    ) -> None:
        super().__init__(request.index, rows, layout.find_rows, train=train)
        self.marks = request.marks

    def _search(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return keys, self.marks[keys] > 0


class Replicated:
    """Tables that every rank holds whole. Lazy: only rows that some rank read change."""

    def __init__(
        self, specs: Sequence[TableSpec], optimizer: RowOptimizer, transport: Transport
    ) -> None:
        self.layout = ShardLayout(tuple(specs), 1)
        ranges = [
            TableRange(spec, self.layout.base(table), 0, spec.rows)
            for table, spec in enumerate(specs)
        ]
        self.rows: Storage = DeviceStorage(ranges, self.layout.size, optimizer, transport.device)
        self.encoding = specs[0].dtype

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> MarkedRequest:
        """Marks the rows that this rank reads."""
        with transport.ledger.span("deduplicate"):
            marks = self.rows.weight.new_zeros(self.layout.size)
            given = list_ids(batches, self.layout.specs).ids
            parts = [self.layout.find_rows(table, ids.reshape(-1)) for table, ids in given]
            places = (
                torch.cat(parts)
                if parts
                else torch.zeros(0, dtype=torch.int64, device=marks.device)
            )
            marks[places] = 1
        return MarkedRequest(Index(places[:0], given, places), marks)

    def fetch(self, request: MarkedRequest, transport: Transport, train: bool) -> ReplicatedRows:
        if train:
            self.rows.begin(transport.ledger)
        return ReplicatedRows(self.layout, request, self.rows.weight, train=train)

    def collect(self, rows: ReplicatedRows, transport: Transport) -> tuple[Tensor, Tensor]:
        """(marks [size], gradients [size, width]), summed over the ranks. A collective."""
        gradient = rows.pop_gradient()
        # One message: gradients, and behind them the marks of the rows that were read.
        joined = torch.cat([gradient.view(-1), rows.marks])
        summed = transport.all_reduce(joined, "gradients").wait()
        return summed[gradient.numel() :], summed[: gradient.numel()].view_as(gradient)

    def update(
        self,
        collected: tuple[Tensor, Tensor],
        transport: Transport,
        **options: Unpack[UpdateOptions],
    ) -> None:
        with transport.ledger.span("update rows"):
            rows, gradients = select_marked_rows(*collected)
            self.rows.update(rows, gradients, **options)
