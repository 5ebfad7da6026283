"""A group of tables on a single rank: nothing is exchanged, and the model reads the table itself.

    prepare   where the ids are in the local storage, their rows being resident from then on
    open      the model can read the rows, with all updates up to then
    read      rows of ids, out of the table
    apply     sum the gradients of each row, update it

On a GPU nothing of it reads the device: the number of different rows stays there. Both the rows of
a sharded group, whose only shard this is, and those of a replicated one can be used in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.dynamic.directory import mark_any
from freescale.embedding.dynamic.layout import DynamicLayout, compute_keys
from freescale.embedding.dynamic.storage import DynamicStorage
from freescale.embedding.layout import ShardLayout, choose_stride, spread_ids
from freescale.embedding.request import (
    GroupIds,
    Index,
    Request,
    RequestPart,
    collect_ids,
    has_default_row,
    mark_counted,
    mark_draws,
    sum_readings,
)
from freescale.embedding.storage import Recorder, RowStorage, UpdateOptions
from freescale.kernels.dispatch.requests import deduplicate
from freescale.kernels.dispatch.rows import gather_rows, keeps_gradients, read_rows
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.rows.gradients import RowGradients

# rows, and a gradient for each; or all readings, with those of a row side by side
Collected = tuple[Tensor | SortedRows, Tensor]


class LocalRequest:
    """What a step reads of a group, out of the table itself."""

    def __init__(
        self, given: GroupIds, rows: Tensor, table: Tensor, slots: Tensor | None = None
    ) -> None:
        """rows [n]: local rows of the given ids; slots [n]: where these are in table [slots,
        width], if that is not by their numbers."""
        self._local = rows if slots is not None else None
        rows = rows if slots is None else slots
        self.index, self.rows, self.table = Index(rows[:0], given, rows), rows, table
        self.gradients = RowGradients(self.index.parts, table)
        self.copied: Request | None = None  # once the model reads rows without `read`
        self._places = rows[:0]  # [n]: where each of `rows` is in the copy
        self._sorted: tuple[Tensor, Tensor] | None = None  # `rows`, once they are searched
        self.log_q: Tensor | None = None  # [n] float32, if the table counts draws

    def read(self, part: int | None, index: Tensor) -> Tensor:
        """The rows [..., width] at index [...]; `part` of the ids that were given, or others."""
        return read_rows(self.table, index, self.gradients, part)

    def offer(self, part: int | None, index: Tensor) -> tuple[Tensor, Tensor]:
        """As `Request.offer`: the gradient of all rows that are offered will exist, so they are a
        copy of those that the step reads. How many are different stays on the device: there are as
        many as ids, or as the table has, the last ones without meaning."""
        if self.copied is None:
            nowhere = torch.zeros(0, dtype=torch.int64, device=self.rows.device)
            found = deduplicate(self.rows, nowhere)
            keys = found.keys[: self.table.shape[0] + 1]  # -1, which names no row, may be one
            known = self.index.replace_parts(keys, found.inverse)
            self.copied = Request(known, RequestPart(None, None, [], []), keys)
            self._places = found.inverse
            self.copied.rows = gather_rows(self.table, keys).requires_grad_(True)
        rows = self.copied.rows
        assert rows is not None
        if part is not None:
            return rows, self.copied.index.parts[part].view(index.shape)
        return rows, self.find_copied(index)

    def list_tensors(self) -> list[Tensor]:
        """As `Request.list_tensors`."""
        return [each for each in (self.rows, self._local, self.log_q) if each is not None]

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Local rows [...] -> (where they are in the table, whether the step reads them)."""
        if self._local is None:
            return rows, torch.isin(rows, self.rows)
        if not self._local.numel():
            return torch.zeros_like(rows), torch.zeros_like(rows, dtype=torch.bool)
        reading = _find_reading(self._local.sort(), rows)
        return self.rows[reading].to(rows.dtype), self._local[reading] == rows

    def find_log_q(self, part: int | None, keys: Tensor) -> Tensor:
        """[...] of keys [...]; `part` of the ids that were given, or others."""
        assert self.log_q is not None and self._local is not None
        if part is not None:
            sizes = [each.numel() for each in self.index.parts]
            return torch.split(self.log_q, sizes)[part].view(keys.shape)
        return self.log_q[_find_reading(self._local.sort(), keys)]

    def find_copied(self, rows: Tensor) -> Tensor:
        """Where rows [...] of the table are in the copy: through any reading of the same row,
        because how many of the copy's keys have a meaning is not known here."""
        assert self.copied is not None
        if not self.rows.numel():
            return torch.zeros_like(rows)
        if self._sorted is None:
            self._sorted = self.rows.sort()
        return self._places[_find_reading(self._sorted, rows)]


def _find_reading(ordered: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    """Where wanted values [...] are in a tensor, which is given sorted: (values, order)."""
    values, order = ordered
    place = torch.searchsorted(values, wanted.to(values.dtype))
    return order[place.clamp_(max=values.numel() - 1)]


class LocalGroup:
    """A group whose rows are all here."""

    def __init__(
        self,
        layout: ShardLayout | DynamicLayout,
        rows: RowStorage,
        encoding: torch.dtype | None = None,
    ) -> None:
        """`encoding`: rows and gradients are rounded to it, as if they travelled."""
        assert layout.world == 1
        self.layout, self.rows = layout, rows
        self._encoding = encoding or rows.weight.dtype
        self._ids = layout.local_dtype

    def prepare(self, batches: Sequence[SequenceBatch], ledger: Recorder) -> LocalRequest | Request:
        """The rows that some (micro-)batches read become resident. Where the kernels cannot keep
        the gradients of what reads the table, or rows are rounded, a copy will be read."""
        given, weight = collect_ids(batches, self.layout.specs), self.rows.weight
        if keeps_gradients(weight) and self._encoding == weight.dtype:
            rows = self._spread(given)
            slots = self.rows.make_resident(rows, ledger, self._mark(batches))
            if (missing := self._find_missing(slots)) is not None:
                slots = torch.where(missing, slots[-1], slots)
            request = LocalRequest(given, rows, weight, None if slots is rows else slots)
            request.log_q = self._count_draws(batches, rows)
            self.rows.wait_for_rows()  # the model reads them, on its own stream
            return request
        parts = [self._locate(table, ids.reshape(-1)) for table, ids in given]
        none = torch.zeros(0, dtype=torch.int64, device=weight.device)
        unique, inverse = torch.unique(torch.cat([none, *parts]), return_inverse=True)
        whole = RequestPart(None, None, [], [])
        copied = Request(Index(unique, given, inverse), whole, unique)
        if (counted := self._mark(batches)) is not None:
            counted = mark_any(counted, inverse, unique.numel())
        copied.slots = self.rows.make_resident(unique, ledger, counted)
        if (missing := self._find_missing(copied.slots)) is not None:
            copied.index.redirect(missing)
        copied.log_q = self._count_draws(batches, unique, inverse)
        self.rows.wait_for_rows()
        return copied

    def _find_missing(self, slots: Tensor) -> Tensor | None:
        """[n] bool: which slots [n] are of ids that read a learned default row, the last id that
        was given; None where there is no such row, or nothing is read."""
        if not slots.numel() or not has_default_row(self.layout.specs[0]):
            return None
        assert isinstance(self.rows, DynamicStorage)
        return self.rows.find_missing(slots).bool()

    def _count_draws(
        self, batches: Sequence[SequenceBatch], rows: Tensor, inverse: Tensor | None = None
    ) -> Tensor | None:
        """Log-q [n] of rows [n], if the table counts draws. `inverse`: of each reading, if there
        is not a row for each."""
        if not isinstance(self.rows, DynamicStorage) or self.rows.draws is None:
            return None
        worth = mark_draws(batches, self.layout.specs[0])
        sums = torch.zeros_like(rows, dtype=torch.int64)
        if worth is not None:
            sums = worth if inverse is None else sums.index_add_(0, inverse, worth)
        return self.rows.count_draws(rows, sums)

    def _mark(self, batches: Sequence[SequenceBatch]) -> Tensor | None:
        dynamic = isinstance(self.layout, DynamicLayout)
        return mark_counted(batches, self.layout.specs[0]) if dynamic else None

    def open(self, request: LocalRequest | Request) -> None:
        """The rows are as the last step left them: from now on they can be read."""
        if isinstance(request, Request):
            assert request.slots is not None
            rows = self.rows.gather(request.slots, self._encoding)
            request.open(rows.to(self.rows.weight.dtype), train=True)

    def _spread(self, given: GroupIds) -> Tensor:
        """[n] local rows of the given ids, by one kernel for each table."""
        if isinstance(self.layout, DynamicLayout):
            none = torch.zeros(0, dtype=torch.int64, device=self.rows.weight.device)
            return compute_keys(torch.cat([none, *(ids.reshape(-1) for _, ids in given)]))
        sizes = [ids.numel() for _, ids in given]
        rows = torch.empty(sum(sizes), dtype=self._ids, device=self.rows.weight.device)
        begin = 0
        for table, spec in enumerate(self.layout.specs):
            parts = [ids.reshape(-1) for owner, ids in given if owner == table]
            if not parts:
                continue
            ids = torch.cat(parts) if len(parts) > 1 else parts[0]
            triton_row_sums.spread_ids(
                ids,
                rows[begin : begin + ids.numel()],
                choose_stride(spec.rows),
                spec.rows,
                self.layout.base(table),
            )
            begin += ids.numel()
        return rows

    def _locate(self, table: int, ids: Tensor) -> Tensor:
        if isinstance(self.layout, DynamicLayout):
            return compute_keys(ids)
        return spread_ids(ids, self.layout.specs[table].rows) + self.layout.base(table)

    def locate(
        self, request: LocalRequest | Request, table: int, ids: Tensor
    ) -> tuple[int | None, Tensor, Tensor | None]:
        """As `Sharded.locate`."""
        known = request.index.find_known(table, ids)
        if known is not None:
            return *known, None
        rows = self._locate(table, ids)
        if isinstance(request, Request):
            return None, *request.index.search(rows)
        return None, *request.find(rows)

    def find_log_q(self, request: LocalRequest | Request, table: int, ids: Tensor) -> Tensor:
        """As `Sharded.find_log_q`."""
        if isinstance(request, LocalRequest):
            known = request.index.find_known(table, ids)
            part = None if known is None else known[0]
            return request.find_log_q(part, self._locate(table, ids))
        assert request.log_q is not None
        index = request.index.find_own(table, ids, self._locate(table, ids))
        return request.log_q.index_select(0, index.reshape(-1)).view(ids.shape)

    def apply(self, request: LocalRequest | Request, **options: Unpack[UpdateOptions]) -> None:
        """Updates the rows by the gradients of what has read them."""
        self.update(self.collect(request), **options)

    def collect(self, request: LocalRequest | Request) -> Collected:
        """The gradients of what has read the rows."""
        if isinstance(request, Request):
            gradient = request.take_gradient().to(self._encoding).to(self.rows.weight.dtype)
            assert request.slots is not None
            return self.rows.find_targets(request.slots), gradient
        copied = request.copied
        if copied is not None and copied.rows is not None and copied.rows.grad is not None:
            # those that were read in the table, by their places in the copy
            gradients = request.gradients.move(copied.index.parts, request.find_copied)
            sums = sum_readings(gradients, copied.rows.grad, copied.rows.shape[0])
            return self.rows.find_targets(copied.owned), sums
        rows, values = request.gradients.take()
        return SortedRows.of(self.rows.find_targets(rows)), values

    def update(self, collected: Collected, **options: Unpack[UpdateOptions]) -> None:
        """Updates the rows that `collect` found."""
        rows, gradients = collected
        if isinstance(rows, SortedRows):
            self.rows.update_readings(rows, gradients, **options)
        else:
            self.rows.update(rows, gradients, **options)
