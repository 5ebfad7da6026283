"""Row optimizers in plain torch. They touch only the given rows, which are unique.

They work in blocks of rows that fit a core's cache. A step is bound by memory traffic: this way
several passes over a block cost one trip to memory instead of one each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_BYTES = 1 << 19  # half an L2 cache slice of a server core


def clip_rows(gradients: Tensor, limit: float) -> Tensor:
    """Scales each row of gradients [r, width] to a norm of at most `limit`, in place."""
    norms = gradients.norm(dim=1, keepdim=True)
    return gradients.mul_((limit / norms.clamp(min=1e-30)).clamp(max=1.0))


def _split_blocks(rows: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, _BLOCK_BYTES // max(1, gradients.shape[1] * gradients.element_size()))
    if rows.device.type != "cpu":
        size = max(1, rows.numel())
    yield from zip(torch.split(rows, size), torch.split(gradients, size), strict=True)


def sgd(weight: Tensor, rows: Tensor, gradients: Tensor, *, lr: float) -> None:
    for block, gradient in _split_blocks(rows, gradients):
        weight.index_copy_(0, block, weight.index_select(0, block).add_(gradient, alpha=-lr))


def adagrad(
    weight: Tensor, total: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, eps: float
) -> None:
    """total [n, width]: running sum of squared gradients."""
    for block, gradient in _split_blocks(rows, gradients):
        squares = total.index_select(0, block).addcmul_(gradient, gradient)
        total.index_copy_(0, block, squares)
        scale = squares.sqrt_().add_(eps)
        weight.index_copy_(
            0, block, weight.index_select(0, block).addcdiv_(gradient, scale, value=-lr)
        )


def rowwise_adagrad(
    weight: Tensor, total: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, eps: float
) -> None:
    """total [n]: running sum of each row's mean squared gradient."""
    for block, gradient in _split_blocks(rows, gradients):
        squares = total.index_select(0, block).add_(gradient.square().mean(dim=1))
        total.index_copy_(0, block, squares)
        scale = squares.sqrt_().add_(eps)[:, None]
        weight.index_copy_(
            0, block, weight.index_select(0, block).addcdiv_(gradient, scale, value=-lr)
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
    """first, second [n, width]: moments. Bias correction by the global step, from 1."""
    correction = 1 - betas[0] ** step
    root = (1 - betas[1] ** step) ** 0.5
    for block, gradient in _split_blocks(rows, gradients):
        mean = first.index_select(0, block).lerp_(gradient, 1 - betas[0])
        first.index_copy_(0, block, mean)
        square = (
            second.index_select(0, block)
            .mul_(betas[1])
            .addcmul_(gradient, gradient, value=1 - betas[1])
        )
        second.index_copy_(0, block, square)
        scale = square.sqrt_().div_(root).add_(eps)
        weight.index_copy_(
            0, block, weight.index_select(0, block).addcdiv_(mean, scale, value=-lr / correction)
        )


def counted_adam(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    correction: Tensor,
    rows: Tensor,
    gradients: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """first, second [n, width]: moments of the rows' gradients. correction [n, 2]: 1 - beta ** (the
    row's own updates), kept as the moments of a gradient of 1: the last bits of a computed power
    would depend on its place in a vector. On a GPU a row of -1 is skipped."""
    rates = [1 - beta for beta in betas]
    both = torch.tensor(rates, dtype=weight.dtype, device=weight.device)
    for block, gradient in _split_blocks(rows, gradients):
        # `where`, not a product with 0: the gradient of a skipped row may be uninitialised memory
        gradient = gradient.where((block >= 0)[:, None], 0)
        there = (block >= 0).to(weight.dtype)[:, None]
        block = block.clamp(min=0).long()
        change = (gradient - first.index_select(0, block)) * rates[0]
        mean = _add_to_rows(first, block, change * there)
        change = (gradient * gradient - second.index_select(0, block)) * rates[1]
        square = _add_to_rows(second, block, change * there)
        change = (1 - correction.index_select(0, block)) * both
        age = _add_to_rows(correction, block, change * there)
        scale = (square / age[:, 1:].clamp(min=rates[1])).sqrt_().add_(eps)
        change = (mean / age[:, :1].clamp(min=rates[0])).div_(scale).mul_(-lr)
        _add_to_rows(weight, block, change * there)


def _add_to_rows(values: Tensor, rows: Tensor, change: Tensor) -> Tensor:
    """Adds changes [r, ...] to rows [r] of values [n, ...], and returns the new rows."""
    moved = values.index_select(0, rows) + change
    values.index_add_(0, rows, change)
    return moved
