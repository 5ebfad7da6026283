"""`reference.sampled_softmax.sampled_softmax` on a CPU. Where the batch shares its negatives, what
is between the matrix products is one call of C each; where each sample has its own and histories
are short, all of it is C."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.native.bindings import address, load_native, require_native
from freescale.kernels.reference.sampled_softmax import Negatives, check_inputs

MOST_PRODUCTS = 1 << 21  # of tokens and negatives: more than that is bound by memory
# Of a sample with negatives of its own, on average: of more, a library multiplies faster than C.
MOST_TOKENS = 16


Columns = Sequence[Tensor | None]  # weights, log q of the targets, log q of the negatives


def fits(outputs: Tensor, rows: Tensor, negatives: Negatives) -> bool:
    """Whether such tensors can go through here."""
    return (
        negatives.per in ("batch", "sample")
        and outputs.dtype == rows.dtype == torch.float32
        and outputs.device.type == "cpu"
        and 0 < outputs.shape[0] * negatives.count <= MOST_PRODUCTS
        and (negatives.per == "batch" or outputs.shape[0] <= MOST_TOKENS * len(negatives.index))
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
    each = lengths.contiguous() if negatives.per == "sample" else None
    total: Tensor = _SampledSoftmax.apply(  # type: ignore[no-untyped-call]
        outputs, rows, *index, each, columns, temperature, normalize, need
    )
    return total


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, rows, targets, index, each, columns, temperature, normalize, need):  # type: ignore[no-untyped-def]
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
        compare = _compare_shared if each is None else partial(_compare_in_samples, each)
        loss, slope, grad_x, grad_others = compare(
            x, y, others, targets, index, columns, temperature, need
        )
        if need:
            grad_rows, room = torch.zeros_like(rows), outputs.new_empty(width)
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
        return *(part * grad for part in ctx.saved_tensors), *[None] * 7


# loss and slope of x.y [tokens]; of x and of the negatives, the products' part of the slopes
_Compared = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _compare_shared(
    x: Tensor,
    y: Tensor,
    others: Tensor,
    targets: Tensor,
    index: Tensor,
    columns: Columns,
    temperature: float,
    need: bool,
) -> _Compared:
    """One list of negatives [count]; others [count, width]."""
    products = torch.mm(x, others.t())
    loss, slope = x.new_empty(2, len(x))
    require_native().compare_with_negatives(
        *products.shape,
        x.shape[1],
        *map(address, (products, x, y, targets, index, *columns)),
        temperature,
        address(loss),
        address(slope),
    )
    if not need:
        return loss, slope, None, None
    return loss, slope, torch.mm(products, others), torch.mm(products.t(), x)


def _compare_in_samples(
    lengths: Tensor,
    x: Tensor,
    y: Tensor,
    others: Tensor,
    targets: Tensor,
    index: Tensor,
    columns: Columns,
    temperature: float,
    need: bool,
) -> _Compared:
    """A list of negatives of each sample [samples, count]; others [samples * count, width]."""
    products = x.new_empty(int(lengths.max()), index.shape[1])
    loss, slope = x.new_empty(2, len(x))
    grads = (torch.empty_like(x), torch.empty_like(others)) if need else (None, None)
    require_native().compare_in_samples(
        *index.shape,
        x.shape[1],
        *map(address, (lengths, x, y, others, targets, index, *columns)),
        temperature,
        *map(address, (products, loss, slope, *grads)),
    )
    return loss, slope, *grads
