"""Rows of a group that the model reads in a step, and the gradients of what has read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from freescale.embedding.request import Index, Requested, Resident
from freescale.kernels.dispatch.rows import keeps_gradients, read_rows, sum_by_row
from freescale.kernels.rows.gradients import RowGradients

FindKeys = Callable[[int, Tensor], Tensor]  # keys [...] of a table's ids [...]


class Rows(Protocol):
    """The rows of a group, as the model reads them."""

    def locate(self, table: int, ids: Tensor) -> tuple[int | None, Tensor, Tensor | None]:
        """(number of the part or None, index [...] of ids [...]) for `read` and `offer`, and found
        [...]: which ids are there; None if all are known to be."""

    def read(self, part: int | None, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The rows [..., width] at index [...], of a given `part` of ids, or others; as `dtype`."""

    def offer(self, part: int | None, index: Tensor) -> tuple[Tensor, Tensor]:
        """All rows [u, width], and the index [...] of some: for readers without `read`."""

    def find_log_q(self, table: int, ids: Tensor) -> Tensor | None:
        """[...] of ids [...] of a training batch; None if the table does not count draws."""


class FetchedRows:
    """A copy of the rows, fetched from their owners."""

    def __init__(
        self,
        index: Index,
        rows: Tensor,
        find_keys: FindKeys,
        *,
        train: bool,
        log_q: Tensor | None = None,
    ) -> None:
        """rows [u, width], whose memory is used as it is; `train`: their gradient is wanted; log_q
        [u] of the index's keys, if the table counts draws."""
        self.index, self.log_q = index, log_q
        self._find_keys = find_keys
        self._rows = rows.detach().requires_grad_(train)
        self._gradients: RowGradients | None = None
        if train and keeps_gradients(rows):
            self._gradients = RowGradients(index.parts, self._rows.detach())

    def locate(self, table: int, ids: Tensor) -> tuple[int | None, Tensor, Tensor | None]:
        known = self.index.find_known(table, ids)
        if known is not None:
            return *known, None
        return None, *self._search(self._find_keys(table, ids))

    def _search(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.index.search(keys)

    def read(self, part: int | None, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        rows = self._rows if self._gradients is None else self._rows.detach()
        return read_rows(rows, index, self._gradients, part, dtype)

    def offer(self, part: int | None, index: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows, index

    def find_log_q(self, table: int, ids: Tensor) -> Tensor | None:
        if self.log_q is None:
            return None
        index = self.index.find_own(table, ids, self._find_keys(table, ids))
        return self.log_q.index_select(0, index.reshape(-1)).view(ids.shape)

    def pop_gradient(self) -> Tensor:
        """The gradient of the rows [u, width]. Drops the rows: nothing can be read any more."""
        rows, gradients = self._rows, self._gradients
        del self._rows, self._gradients
        if gradients is not None:
            return sum_readings(gradients, rows.grad, rows.shape[0])
        return rows.grad if rows.grad is not None else torch.zeros_like(rows)


class TrainingRows(FetchedRows):
    """Rows of a training step, with what their gradients need to find their way back."""

    def __init__(
        self, request: Requested, resident: Resident, rows: Tensor, find_keys: FindKeys
    ) -> None:
        log_q = resident.log_q.wait() if resident.log_q is not None else None
        super().__init__(resident.index, rows, find_keys, train=True, log_q=log_q)
        self.request, self.resident = request, resident


def sum_readings(gradients: RowGradients, others: Tensor | None, count: int) -> Tensor:
    """[count, width]: the gradients of what has read rows, summed by row; and of what has read them
    by itself, which made `others` [count, width]: the sums are added there."""
    rows, values = gradients.take(only_read=others is not None)
    if others is not None and not rows.numel():
        return others
    return sum_by_row(values, rows, count, others, gradients.dtype)
