"""The functions of `row_updates.reference` on a CPU, Adam and row-wise Adagrad in C in one pass;
and AdamW of whole tensors. Large updates use torch's number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from freescale.kernels.native import address, list_addresses, load_native, require_native
from freescale.kernels.row_updates.reference import adagrad, clip_rows, sgd

__all__ = ["adagrad", "adam", "adam_tensors", "clip_rows", "fits", "rowwise_adagrad", "sgd"]


def fits(weight: Tensor) -> bool:
    """Whether these functions update a table. Depends on the table, never on the number of rows or
    threads: schedules divide a step's rows differently and must agree in every bit."""
    usual = weight.device.type == "cpu" and weight.dtype == torch.float32
    return usual and load_native() is not None


def rowwise_adagrad(
    weight: Tensor, total: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, eps: float
) -> None:
    assert weight.is_contiguous() and total.is_contiguous() and rows.dtype == torch.int64
    rows, gradients = rows.contiguous(), gradients.contiguous()
    require_native().rowwise_adagrad_rows(
        *gradients.shape,
        *map(address, (rows, gradients, weight, total)),
        *(eps, lr, torch.get_num_threads()),
    )


def adam(
    weight: Tensor, first: Tensor, second: Tensor, rows: Tensor, gradients: Tensor, *,
    lr: float, betas: tuple[float, float], eps: float, step: int,
) -> None:  # fmt: skip
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
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor],
    second: Sequence[Tensor], steps: Sequence[Tensor], *,
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
) -> bool:  # fmt: skip
    """A step of torch.optim.AdamW; all tensors are contiguous float32. `steps` are scalars: the
    steps so far. Returns False, and does nothing, if these are not all the same."""
    step, count = float(steps[0]) + 1, len(parameters)
    done = require_native().adam_tensors(
        count, (c_int64 * count)(*(parameter.numel() for parameter in parameters)),
        *map(list_addresses, (gradients, parameters, first, second, steps)),
        step, 1 - lr * weight_decay, *_list_factors(lr, betas, eps, step), torch.get_num_threads(),
    )  # fmt: skip
    if done:
        torch.autograd.graph.increment_version(parameters)
    return bool(done)


def _list_factors(
    lr: float, betas: tuple[float, float], eps: float, step: float
) -> tuple[float, ...]:
    """The factors of a step of Adam, in the order of the C functions."""
    root, rate = (1 - betas[1] ** step) ** 0.5, lr / (1 - betas[0] ** step)
    return 1 - betas[0], betas[1], 1 - betas[1], root, eps, rate
