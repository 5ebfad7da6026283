"""Table rows in plain torch: gather, sum of duplicates, and row optimizers that touch only the rows
they are given.

Optimizers work in blocks of rows that fit a core's cache: a step is bound by memory traffic, and
each of the several passes over a block then costs one trip to memory instead of one each. Rows of a
call are unique.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

_BLOCK_BYTES = 1 << 19  # half an L2 cache slice of a server core


def gather_rows(weight: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """weight [n, width], rows [r] -> [r, width], in another dtype if one is given."""
    return weight.index_select(0, rows).to(dtype or weight.dtype)


def sum_duplicates(rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Sums gradients [r, width] of equal rows [r], in order of appearance -> sorted unique rows
    [u], sums [u, width].

    On the CPU index_add_ adds source rows one after another, on CUDA each segment is added up by
    itself (index_add_ would use atomics there): a row's sum depends neither on chance nor on the
    other rows of the call.
    """
    return group_duplicates(rows)(gradients)


def group_duplicates(rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`sum_duplicates` of these rows, all but the sums: what can be done before the gradients are
    there."""
    if rows.device.type == "cuda":
        ordered, order = rows.sort(stable=True)
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        sums = partial(torch.segment_reduce, reduce="sum", lengths=counts, axis=0, unsafe=True)
        return lambda gradients: (unique, sums(gradients.index_select(0, order)))
    unique, inverse = torch.unique(rows, return_inverse=True)
    if unique.numel() == rows.numel():
        # No duplicate: a permutation moves the same bits that the sum below would give, for half
        # the traffic.
        order = torch.empty_like(inverse)
        order[inverse] = torch.arange(inverse.numel(), device=rows.device)
        return lambda gradients: (unique, gradients.index_select(0, order))

    def sum_gradients(gradients: Tensor) -> tuple[Tensor, Tensor]:
        # From negative zero: adding to it changes no bit, not even the sign of a zero.
        start = gradients.new_full((unique.numel(), gradients.shape[1]), -0.0)
        return unique, start.index_add_(0, inverse, gradients)

    return sum_gradients


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
    """first, second [n, width]: moments of the rows' gradients. Bias correction by the global step,
    counted from 1."""
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
