"""Row optimizers as Triton kernels, for NVIDIA GPUs: the functions of `row_updates.reference`.

A row's result has the same bits whichever other rows are in the call. On a GPU SGD and Adagrad have
the bits of the reference; Adam and the functions that sum over a row are within 2e-6 relative. A
row number of -1 means no row. Other numbers are not checked against the table's size.

Instead of unique rows and their gradients, the optimizers but `rowwise_adagrad` accept `SortedRows`
and the gradients of all reads, which may have 16 bits, and sum them: with the bits of
`row_sums.sum_sorted`, without memory for the sums. With `marks` they mark the rows that they
update.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.jit.launch import KernelModule, RowLaunch, launch_blocks
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.row_sums.triton import check_rows, shape_sums, sum_chunks
from freescale.kernels.rows.triton import DTYPES

# The more tensors an optimizer has, the smaller its tile for the same number of registers.
CLIP = RowLaunch(1024, 4)
SGD, ADAGRAD, ADAM = RowLaunch(1024, 4), RowLaunch(1024, 4), RowLaunch(512, 4)
# addcmul with a factor of 1: one rounding in torch's CUDA kernel of 2026, two before
SQUARES_FUSED = True
_EXACT = {"enable_fp_fusion": False}
_kernels = KernelModule("freescale.kernels.row_updates.triton_kernels")


def clip_rows(gradients: Tensor, limit: float) -> Tensor:
    check_rows(None, gradients=gradients)
    assert gradients.is_contiguous(), "they are clipped in place"
    shape = CLIP.shape(gradients.shape[1])
    launch_blocks(
        _kernels.clip_kernel, gradients.device, len(gradients), shape["R"], gradients,
        len(gradients), float(limit), **shape,
    )  # fmt: skip
    return gradients


def sgd(
    weight: Tensor, rows: Tensor | SortedRows, gradients: Tensor, *, lr: float,
    marks: Tensor | None = None,
) -> None:  # fmt: skip
    _update("sgd_kernel", SGD, (weight,), rows, gradients, marks, lr=lr)


def adagrad(
    weight: Tensor, total: Tensor, rows: Tensor | SortedRows, gradients: Tensor, *,
    lr: float, eps: float, marks: Tensor | None = None,
) -> None:  # fmt: skip
    tensors, options = (weight, total), {"lr": lr, "eps": eps, "FUSED": SQUARES_FUSED}
    _update("adagrad_kernel", ADAGRAD, tensors, rows, gradients, marks, **options)


def rowwise_adagrad(
    weight: Tensor, total: Tensor, rows: Tensor, gradients: Tensor, *,
    lr: float, eps: float, marks: Tensor | None = None,
) -> None:  # fmt: skip
    tensors = (weight, total)
    options = {"lr": lr, "eps": eps, "inverse": 1 / max(1, weight.shape[-1])}
    _update("rowwise_adagrad_kernel", ADAGRAD, tensors, rows, gradients, marks, **options)


def adam(
    weight: Tensor, first: Tensor, second: Tensor, rows: Tensor | SortedRows, gradients: Tensor, *,
    lr: float, betas: tuple[float, float], eps: float, step: int, marks: Tensor | None = None,
) -> None:  # fmt: skip
    correction = 1 - betas[0] ** step
    root = (1 - betas[1] ** step) ** 0.5
    # torch rounds its scalars to float32 first, and divides by a scalar by multiplying
    share = np.float32(1 - betas[0])
    options = {
        "lr": lr / correction,
        "share": float(share),
        "other_share": float(np.float32(1) - share),
        "beta": betas[1],
        "other_beta": 1 - betas[1],
        "inverse_root": float(np.float32(1) / np.float32(root)),
        "eps": eps,
        "SMALL": bool(abs(share) < 0.5),
    }
    _update("adam_kernel", ADAM, (weight, first, second), rows, gradients, marks, **options)


def _update(
    kernel: str, launch: RowLaunch, tensors: tuple[Tensor, ...], rows: Tensor | SortedRows,
    gradients: Tensor, marks: Tensor | None, **options: Any,
) -> None:  # fmt: skip
    weight = tensors[0]
    numbers, order = (rows.rows, rows.order) if isinstance(rows, SortedRows) else (rows, None)
    dtypes = (torch.float32,) if order is None else DTYPES  # sums are in float32
    check_rows(numbers, dtypes, weight=weight, gradients=gradients)
    check_rows(None, weight=weight)
    assert gradients.shape == (numbers.numel(), weight.shape[1]), gradients.shape
    rowwise = kernel == "rowwise_adagrad_kernel"
    assert order is None or not rowwise, "rowwise_adagrad takes unique rows"
    for state in tensors[1:]:
        assert state.shape == (weight.shape[:1] if rowwise else weight.shape), state.shape
        assert state.dtype == weight.dtype and state.device == weight.device, state
        assert state.is_contiguous()
    if not gradients.numel():
        return
    gradients, partial = gradients.contiguous(), None
    shape = launch.shape(weight.shape[1]) | {"CHUNK": 1, "STEPS": 1, "UNROLL": 1}
    if isinstance(rows, SortedRows):
        shape, partial = shape_sums(launch, weight.shape[1]), sum_chunks(rows, gradients)
    launch_blocks(
        getattr(_kernels, kernel), weight.device, numbers.numel(), shape["R"], *tensors,
        numbers.contiguous(), gradients, order, partial, marks, numbers.numel(),
        **options, SORTED=order is not None, **shape, **_EXACT,
    )  # fmt: skip
