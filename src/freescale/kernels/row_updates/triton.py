"""Row optimizers as Triton kernels: the twins of `reference.row_updates`, for NVIDIA GPUs.

What is computed for a row depends on that row alone: the same bits whichever other rows are in the
call. On a GPU SGD and Adagrad give the bits of their twins; Adam and the functions that sum over a
row (`rowwise_adagrad`, `clip_rows`) are within 2e-6 relative. A row number of -1 names no row: it
is neither read nor written. Whether other numbers lie in the table is not checked.

In the place of unique rows and their gradients the optimizers take `SortedRows` and the gradients
of all that read them, and sum those of a row on the way: the bits of `row_sums.sum_sorted` and an
update by its results, without memory for the sums. Not so `rowwise_adagrad`, which adds up the
entries of a row as well: in which order depends on the kernel around it.

With `marks`, those of `reference.marks`, they mark the rows that they update.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from freescale.kernels.jit.launch import RowLaunch, count_blocks, launch_kernel, use_device
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.row_sums.triton import shape_sums, sum_chunks
from freescale.kernels.rows.triton import check_rows

# The more tensors an optimizer has, the smaller its tile for the same number of registers.
CLIP = RowLaunch(1024, 4)
SGD, ADAGRAD, ADAM = RowLaunch(1024, 4), RowLaunch(1024, 4), RowLaunch(512, 4)
# addcmul with a factor of 1: one rounding in torch's CUDA kernel of 2026, two before
SQUARES_FUSED = True
_EXACT = {"enable_fp_fusion": False}


def clip_rows(gradients: Tensor, limit: float) -> Tensor:
    """Scales each row of gradients [r, width] to a norm of at most `limit`, in place."""
    check_rows(None, gradients=gradients)
    if not gradients.is_contiguous():
        raise ValueError(
            "gradients must be contiguous to be clipped in place, not of strides "
            f"{gradients.stride()}"
        )
    if gradients.numel():
        from freescale.kernels.row_updates.triton_kernels import clip_kernel

        shape = CLIP.shape(gradients.shape[1])
        with use_device(gradients.device):
            launch_kernel(
                clip_kernel, (count_blocks(len(gradients), shape["R"]),), gradients, len(gradients),
                float(limit), **shape,
            )  # fmt: skip
    return gradients


def sgd(
    weight: Tensor,
    rows: Tensor | SortedRows,
    gradients: Tensor,
    *,
    lr: float,
    marks: Tensor | None = None,
) -> None:
    _update("sgd_kernel", SGD, (weight,), rows, gradients, marks, lr=lr)


def adagrad(
    weight: Tensor,
    total: Tensor,
    rows: Tensor | SortedRows,
    gradients: Tensor,
    *,
    lr: float,
    eps: float,
    marks: Tensor | None = None,
) -> None:
    """total [n, width]: running sum of squared gradients."""
    _update(
        "adagrad_kernel",
        ADAGRAD,
        (weight, total),
        rows,
        gradients,
        marks,
        lr=lr,
        eps=eps,
        FUSED=SQUARES_FUSED,
    )


def rowwise_adagrad(
    weight: Tensor,
    total: Tensor,
    rows: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    eps: float,
    marks: Tensor | None = None,
) -> None:
    """total [n]: running sum of each row's mean squared gradient."""
    inverse = 1 / max(1, weight.shape[-1])
    _update(
        "rowwise_adagrad_kernel",
        ADAGRAD,
        (weight, total),
        rows,
        gradients,
        marks,
        lr=lr,
        eps=eps,
        inverse=inverse,
    )


def adam(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    rows: Tensor | SortedRows,
    gradients: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    marks: Tensor | None = None,
) -> None:
    """first, second [n, width]: moments of the rows' gradients. Bias correction by the global step,
    counted from 1."""
    correction = 1 - betas[0] ** step
    root = (1 - betas[1] ** step) ** 0.5
    # torch rounds its scalars to float32 first, and divides by one by multiplying
    share = np.float32(1 - betas[0])
    numbers = {
        "lr": lr / correction,
        "share": float(share),
        "other_share": float(np.float32(1) - share),
        "beta": betas[1],
        "other_beta": 1 - betas[1],
        "inverse_root": float(np.float32(1) / np.float32(root)),
        "eps": eps,
    }
    _update(
        "adam_kernel",
        ADAM,
        (weight, first, second),
        rows,
        gradients,
        marks,
        **numbers,
        SMALL=bool(abs(share) < 0.5),
    )


def _update(
    kernel: str,
    launch: RowLaunch,
    tensors: tuple[Tensor, ...],
    rows: Tensor | SortedRows,
    gradients: Tensor,
    marks: Tensor | None,
    **options: Any,
) -> None:
    weight = tensors[0]
    numbers, order = (rows.rows, rows.order) if isinstance(rows, SortedRows) else (rows, None)
    check_rows(numbers, weight=weight, gradients=gradients)
    if gradients.shape != (numbers.numel(), weight.shape[1]):
        raise ValueError(
            f"gradients must be {[numbers.numel(), weight.shape[1]]}, not {list(gradients.shape)}"
        )
    if order is not None and kernel == "rowwise_adagrad_kernel":
        raise ValueError("rowwise_adagrad takes unique rows: sum their gradients first")
    for state in tensors[1:]:
        if (
            state.shape not in (weight.shape, weight.shape[:1])
            or state.dtype != weight.dtype
            or not state.is_contiguous()
        ):
            raise ValueError(
                f"state of {weight.dtype} {list(weight.shape)} does not fit: "
                f"{state.dtype} {list(state.shape)}"
            )
        if (state.ndim == 1) != (kernel == "rowwise_adagrad_kernel"):
            raise ValueError(
                f"{kernel.removesuffix('_kernel')} does not keep state of shape {list(state.shape)}"
            )
        if state.device != weight.device:
            raise ValueError(f"tensors lie on different devices: {weight.device}, {state.device}")
    if not gradients.numel():
        return
    from freescale.kernels.row_updates import triton_kernels as row_updates_kernels

    shape, gradients, partial = launch.shape(weight.shape[1]), gradients.contiguous(), None
    shape |= {"CHUNK": 1, "STEPS": 1, "UNROLL": 1}
    with use_device(weight.device):
        if isinstance(rows, SortedRows):
            shape, partial = shape_sums(launch, weight.shape[1]), sum_chunks(rows, gradients)
        launch_kernel(
            getattr(row_updates_kernels, kernel), (count_blocks(numbers.numel(), shape["R"]),),
            *tensors, numbers.contiguous(), gradients, order, partial, marks, numbers.numel(),
            **options, SORTED=order is not None, **shape, **_EXACT,
        )  # fmt: skip
