"""`reference.sampled_softmax.sampled_softmax` on a CPU where the batch shares its negatives: what
is between the matrix products is one call of C each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.native.bindings import address, load_native, require_native
from freescale.kernels.reference.sampled_softmax import Negatives, check_inputs

MOST_PRODUCTS = 1 << 21  # of tokens and negatives: more than that is bound by memory


def fits(outputs: Tensor, rows: Tensor, negatives: Negatives) -> bool:
    """Whether such tensors can go through here."""
    return (
        negatives.per == "batch"
        and outputs.dtype == rows.dtype == torch.float32
        and outputs.device.type == "cpu"
        and 0 < outputs.shape[0] * negatives.count <= MOST_PRODUCTS
        and load_native() is not None
    )


def sampled_softmax(
    outputs: Tensor,  # [tokens, width]
    rows: Tensor,  # [u, width]
    targets: Tensor,  # [tokens] int64: indices into rows
    negatives: Negatives,
    lengths: Tensor,  # [samples] int64
    *,
    temperature: float,
    normalize: bool,
    host_lengths: Tensor | None = None,
    weights: Tensor | None = None,  # [tokens]
    targets_log_q: Tensor | None = None,  # [tokens]
) -> Tensor:
    """As the reference."""
    check_inputs(outputs, rows, targets, negatives, lengths, weights, targets_log_q)
    columns = [
        None if column is None else column.detach().float().contiguous()
        for column in (weights, targets_log_q, negatives.log_q)
    ]
    need = torch.is_grad_enabled() and (outputs.requires_grad or rows.requires_grad)
    index = targets.contiguous(), negatives.index.contiguous()
    total: Tensor = _SampledSoftmax.apply(  # type: ignore[no-untyped-call]
        outputs, rows, *index, columns, temperature, normalize, need
    )
    return total


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, rows, targets, index, columns, temperature, normalize, need):  # type: ignore[no-untyped-def]
        library, (tokens, width), count = require_native(), outputs.shape, index.numel()
        outputs, rows = outputs.contiguous(), rows.contiguous()
        x, y = outputs.new_empty(2, tokens, width)
        others = outputs.new_empty(count, width)
        inverse = outputs.new_empty(2 * tokens + count).split([tokens, tokens, count])
        for source, chosen, units, own in zip(
            (outputs, rows, rows), (None, targets, index), (x, y, others), inverse, strict=True
        ):
            sizes = len(units), width, address(source), address(chosen)
            library.gather_units(*sizes, normalize, address(units), address(own))
        products = torch.mm(x, others.t())
        loss, slope = outputs.new_empty(2, tokens)
        library.compare_with_negatives(
            tokens,
            count,
            width,
            *map(address, (products, x, y, targets, index, *columns)),
            temperature,
            address(loss),
            address(slope),
        )
        if need:
            grad_x, grad_rows = torch.mm(products, others), torch.zeros_like(rows)
            grad_others, room = torch.mm(products.t(), x), outputs.new_empty(width)
            library.spread_slopes(
                tokens,
                count,
                width,
                *map(address, (targets, index, slope, x, inverse[0], y, inverse[1])),
                *map(address, (others, inverse[2])),
                normalize,
                *map(address, (room, grad_x, grad_others, grad_rows)),
            )
            ctx.save_for_backward(grad_x, grad_rows)
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *(part * grad for part in ctx.saved_tensors), None, None, None, None, None, None
