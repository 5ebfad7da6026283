"""The sampled softmax on a CPU, loss and gradients in one call of C.

For negatives that the batch shares, negatives of each sample if histories are short, and negatives
of each token, which C reads without gathering them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.native import address, load_native, require_native
from freescale.kernels.softmax.reference import Negatives, check_inputs


class PositionSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, rows, targets, index, columns, temperature, normalize, need):  # type: ignore[no-untyped-def]
        library, width = require_native(), outputs.shape[1]
        outputs, rows = outputs.contiguous(), rows.contiguous()
        x, units = torch.empty_like(outputs), torch.empty_like(rows)
        inverse, inverse_rows = outputs.new_empty(len(x)), outputs.new_empty(len(units))
        for source, unit, own in ((outputs, x, inverse), (rows, units, inverse_rows)):
            sizes = len(unit), width, address(source), None
            library.gather_units(*sizes, normalize, address(unit), address(own))
        loss, products = outputs.new_empty(len(x)), outputs.new_empty(index.shape[1])
        grads = (torch.empty_like(x), torch.zeros_like(units)) if need else (None, None)
        library.compare_at_positions(
            *index.shape, width, *map(address, (x, inverse, units, targets, index, *columns)),
            temperature, normalize, *map(address, (products, loss, *grads)),
        )  # fmt: skip
        if need:
            of_rows = map(address, (units, inverse_rows))
            library.pass_norms(*units.shape, *of_rows, normalize, address(grads[1]))
            ctx.save_for_backward(*grads)
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *(part * grad for part in ctx.saved_tensors), *[None] * 6


MOST_PRODUCTS = 1 << 21  # of tokens and negatives: more are bound by memory
# Mean tokens of a sample with its own negatives: for more, a BLAS library is faster than C.
MOST_TOKENS = 16


def fits(outputs: Tensor, rows: Tensor, negatives: Negatives) -> bool:
    """Whether these functions compute a loss of such tensors."""
    return (
        outputs.dtype == rows.dtype == torch.float32
        and outputs.device.type == "cpu"
        and (negatives.per == "position" or _is_small(len(outputs), negatives))
        and load_native() is not None
    )


def _is_small(tokens: int, negatives: Negatives) -> bool:
    return 0 < tokens * negatives.count <= MOST_PRODUCTS and (
        negatives.per == "batch" or tokens <= MOST_TOKENS * len(negatives.index)
    )


def sampled_softmax(
    outputs: Tensor, rows: Tensor, targets: Tensor, negatives: Negatives, lengths: Tensor, *,
    temperature: float, normalize: bool, host_lengths: Tensor | None = None,
    weights: Tensor | None = None, targets_log_q: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As the reference."""
    check_inputs(outputs, rows, targets, negatives, lengths, weights, targets_log_q)
    columns = [  # [tokens], [tokens], of the shape of the negatives
        None if column is None else column.detach().float().contiguous()
        for column in (weights, targets_log_q, negatives.log_q)
    ]
    need = torch.is_grad_enabled() and (outputs.requires_grad or rows.requires_grad)
    index = targets.contiguous(), negatives.index.contiguous()
    others = columns, temperature, normalize, need
    total: Tensor
    if negatives.per == "position":
        total = PositionSoftmax.apply(outputs, rows, *index, *others)  # type: ignore[no-untyped-call]
    else:
        each = lengths.contiguous() if negatives.per == "sample" else None
        total = _SampledSoftmax.apply(outputs, rows, *index, each, *others)  # type: ignore[no-untyped-call]
    return total


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, rows, targets, index, each, columns, temperature, normalize, need):  # type: ignore[no-untyped-def]
        library, (tokens, width) = require_native(), outputs.shape
        outputs, rows = outputs.contiguous(), rows.contiguous()
        sizes = tokens, 1 if each is None else len(index), index.shape[-1], width
        room = outputs.new_empty(library.count_softmax_room(*sizes, address(each)))
        loss = outputs.new_empty(tokens)
        grads = (torch.empty_like(outputs), torch.empty_like(rows)) if need else (None, None)
        library.sampled_softmax(
            *sizes, len(rows), *map(address, (each, outputs, rows, targets, index, *columns)),
            temperature, normalize, *map(address, (room, loss, *grads)),
        )  # fmt: skip
        ctx.save_for_backward(*grads)
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *(part * grad for part in ctx.saved_tensors), *[None] * 7
