"""Optimizers on a CPU: Adam and row-wise Adagrad of rows in C, in one pass over the rows, the
others as in plain torch; AdamW of whole tensors. Large updates use torch's number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from freescale.kernels.native import (
    address,
    list_addresses,
    load_native,
    require_native,
)
from freescale.kernels.row_updates.reference import adagrad, clip_rows, sgd

__all__ = ["adagrad", "adam", "adam_tensors", "clip_rows", "fits", "rowwise_adagrad", "sgd"]


def fits(weight: Tensor) -> bool:
    """Whether a table is updated here. A property of the table, never of the number of rows or
    threads: schedules divide a step's rows differently and have to agree in every bit."""
    usual = weight.device.type == "cpu" and weight.dtype == torch.float32
    return usual and load_native() is not None


def rowwise_adagrad(
    weight: Tensor, total: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, eps: float
) -> None:
    """As the reference."""
    assert weight.is_contiguous() and total.is_contiguous() and rows.dtype == torch.int64
    rows, gradients = rows.contiguous(), gradients.contiguous()
    require_native().rowwise_adagrad_rows(
        *gradients.shape,
        *map(address, (rows, gradients, weight, total)),
        *(eps, lr, torch.get_num_threads()),
    )


def adam(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    rows: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """As the reference."""
    tables = weight, first, second
    assert all(each.is_contiguous() for each in tables) and rows.dtype == torch.int64
    rows, gradients = rows.contiguous(), gradients.contiguous()
    require_native().adam_rows(
        *gradients.shape,
        *map(address, (rows, gradients, *tables)),
        *_list_factors(lr, betas, eps, step),
        torch.get_num_threads(),
    )


def adam_tensors(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],  # scalars: that were made so far
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> bool:
    """A step of torch.optim.AdamW; all tensors are contiguous float32. Returns False, with nothing
    done, where they have not made the same number of steps."""
    step = float(steps[0]) + 1
    done = require_native().adam_tensors(
        len(parameters),
        (c_int64 * len(parameters))(*(parameter.numel() for parameter in parameters)),
        *map(list_addresses, (gradients, parameters, first, second, steps)),
        step,
        1 - lr * weight_decay,
        *_list_factors(lr, betas, eps, step),
        torch.get_num_threads(),
    )
    if done:
        torch.autograd.graph.increment_version(parameters)
    return bool(done)


def _list_factors(
    lr: float, betas: tuple[float, float], eps: float, step: float
) -> tuple[float, ...]:
    """Of a step of Adam, as C takes them."""
    return (
        1 - betas[0],
        betas[1],
        1 - betas[1],
        (1 - betas[1] ** step) ** 0.5,
        eps,
        lr / (1 - betas[0] ** step),
    )
