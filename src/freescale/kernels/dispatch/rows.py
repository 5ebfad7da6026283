"""Chooses the version of each operation on table rows, by device, dtype and width of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.requests import native as native_requests
from freescale.kernels.row_moves import triton as triton_row_moves
from freescale.kernels.row_sums import reference as row_sums
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.row_updates import native as native_updates
from freescale.kernels.row_updates import reference as row_updates
from freescale.kernels.row_updates import triton as triton_updates
from freescale.kernels.rows import reference, triton
from freescale.kernels.rows.gradients import RowGradients


class RowUpdates(Protocol):
    """The functions of `row_updates.reference`."""

    def clip_rows(self, *arguments: Any, **named: Any) -> Tensor: ...
    def sgd(self, *arguments: Any, **named: Any) -> None: ...
    def adagrad(self, *arguments: Any, **named: Any) -> None: ...
    def rowwise_adagrad(self, *arguments: Any, **named: Any) -> None: ...
    def adam(self, *arguments: Any, **named: Any) -> None: ...


def _fits_triton(table: Tensor, dtypes: tuple[torch.dtype, ...] = triton.DTYPES) -> bool:
    return (
        runs_triton(table.device)
        and table.dtype in dtypes
        and 1 <= table.shape[1] <= triton_row_sums.MAX_WIDTH
    )


def fits_exchange(weight: Tensor) -> bool:
    """Whether Triton draws, exchanges and updates rows of this table."""
    return _fits_triton(weight, (torch.float32,))


def choose_optimizers(weight: Tensor) -> RowUpdates:
    """The functions that update this table."""
    if fits_exchange(weight):
        return triton_updates
    return native_updates if native_updates.fits(weight) else row_updates


def choose_row_swap(weight: Tensor) -> Callable[[Tensor, Tensor, Tensor], None]:
    """`rows.reference.swap_rows` of this table, and of its state."""
    return triton_row_moves.swap_rows if fits_exchange(weight) else reference.swap_rows


def keeps_gradients(table: Tensor) -> bool:
    """Whether `read_rows` can leave gradients of a table to `RowGradients`, and -1 names no row."""
    return choose_optimizers(table) is triton_updates


def gather_rows(weight: Tensor, numbers: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`rows.reference.gather_rows`: weight [n, width], numbers [r] -> [r, width]."""
    compute = triton.gather_rows if _fits_triton(weight) else reference.gather_rows
    return compute(weight, numbers, dtype)


def read_rows(
    table: Tensor, index: Tensor, gradients: RowGradients | None = None, part: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """table [u, width], index [...] into it -> [..., width], in another dtype if one is given. With
    `gradients`, if the table `keeps_gradients`, backward adds to their part."""
    if _fits_triton(table):
        return triton.read_rows(table, index, gradients, part, dtype)
    assert gradients is None
    return torch.nn.functional.embedding(index, table).to(dtype or table.dtype)


def sum_rows(table: Tensor, index: Tensor) -> Tensor:
    """table [u, width], index [n, places] into it, -1 for nothing -> [n, width]: sums of rows."""
    if _fits_triton(table):
        return triton.sum_rows(table, index)
    # embedding_bag sums gradients in an order that depends on the other rows
    found = torch.nn.functional.embedding(index.clamp(min=0), table)
    return (found * (index >= 0)[..., None]).sum(-2)


def sum_by_row(
    values: Tensor, numbers: Tensor, count: int, onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`row_sums.reference.sum_by_row`: values [n, width] of rows [n] -> [count, width]."""
    if _fits_triton(values):
        return triton_row_sums.sum_by_row(values, numbers.to(torch.int32), count, onto, dtype)
    return row_sums.sum_by_row(values, numbers, count, onto, dtype)


def sum_sorted(numbers: SortedRows, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """`row_sums.reference.sum_sorted` in the dtype of the table. If the optimizers skip rows of -1,
    the result has them between the unique rows, and nothing is read from the device."""
    compute = triton_row_sums.sum_sorted if keeps_gradients(table) else row_sums.sum_sorted
    return compute(numbers, values, table.dtype)


def sum_in_order(parts: Tensor, copies: int) -> Tensor:
    """`row_sums.reference.sum_in_order`, in Triton on a GPU."""
    fits = runs_triton(parts.device) and parts.dtype in triton_row_sums.DTYPES
    compute = triton_row_sums.sum_in_order if fits else row_sums.sum_in_order
    return compute(parts, copies)


def group_duplicates(numbers: Tensor, like: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`rows.reference.group_duplicates` for gradients with the dtype and device of `like`. If the
    optimizers skip rows of -1, the result ends with them, and nothing is read from the device."""
    if keeps_gradients(like):
        return triton.group_duplicates(numbers)
    summed = native_requests.group_duplicates(numbers) if native_updates.fits(like) else None
    return summed or reference.group_duplicates(numbers)


def select_marked_rows(marks: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """marks [n], gradients [n, width] of all rows -> numbers and gradients of the marked rows. If
    that saves a read from the device: all n rows, with numbers of -1 for unmarked ones."""
    if keeps_gradients(gradients):
        every = torch.arange(marks.numel(), device=marks.device)
        return torch.where(marks > 0, every, -1), gradients
    numbers = marks.nonzero().squeeze(1)
    return numbers, gradients.index_select(0, numbers)
