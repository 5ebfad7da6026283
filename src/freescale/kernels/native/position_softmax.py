"""The sampled softmax on a CPU where each token has negatives of its own: one call of C, which
gathers nothing."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from freescale.kernels.native.bindings import address, require_native


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
            *index.shape,
            width,
            *map(address, (x, inverse, units, targets, index, *columns)),
            temperature,
            normalize,
            *map(address, (products, loss, *grads)),
        )
        if need:
            of_rows = map(address, (units, inverse_rows))
            library.pass_norms(*units.shape, *of_rows, normalize, address(grads[1]))
            ctx.save_for_backward(*grads)
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *(part * grad for part in ctx.saved_tensors), *[None] * 6
