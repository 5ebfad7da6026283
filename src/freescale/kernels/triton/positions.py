"""Positions and token keys as Triton kernels: the twin of `reference.positions`, for NVIDIA GPUs.

One launch forward, one backward, and one more for candidates. The gradient of a position is a sum
over the samples in their order, without a sort: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.triton.attention_plan import TilePlan
from freescale.kernels.triton.launch import (
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    use_device,
)

FORWARD, BACKWARD = RowLaunch(2048, 4), RowLaunch(2048, 4)


def add_positions(
    x: Tensor,  # [tokens, width]
    position: Tensor,  # [positions, width]
    plan: TilePlan,
    keys: Tensor | None,  # [samples] int64
) -> tuple[Tensor, Tensor | None]:
    """(x with the rows of the tokens' positions added, in their dtype; [tokens] int64 keys)."""
    require_gpu(x.device, "kernels.reference.positions")
    out, token_keys = _AddPositions.apply(  # type: ignore[no-untyped-call]
        x, position, plan, keys
    )
    return out, token_keys


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, position, plan, keys):  # type: ignore[no-untyped-def]
        from freescale.kernels.triton.positions_kernels import add_positions_kernel

        tokens, shape = x.shape[0], FORWARD.shape(x.shape[1])
        ctx.plan, ctx.dtype, ctx.shape, ctx.position_dtype = (
            plan, x.dtype, position.shape, position.dtype
        )  # fmt: skip
        out = torch.empty(x.shape, dtype=position.dtype, device=x.device)
        token_keys = None
        if keys is not None:
            token_keys = torch.empty(tokens, dtype=torch.int64, device=x.device)
            ctx.mark_non_differentiable(token_keys)
        samples = len(plan.host)
        with use_device(x.device):
            launch_kernel(
                add_positions_kernel, (count_blocks(tokens, shape["R"]),),
                x.contiguous(), position.contiguous(), None if keys is None else keys.contiguous(),
                plan.samples(), out, token_keys, tokens, samples, samples.bit_length(), **shape,
            )  # fmt: skip
        return out, token_keys

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        from freescale.kernels.triton.positions_kernels import (
            position_gradient_kernel,
            sum_candidates_kernel,
        )

        plan, grad, (positions, width) = ctx.plan, grad.contiguous(), ctx.shape
        grad_x = grad.to(ctx.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        samples, shape, sums = len(plan.host), BACKWARD.shape(width), None
        out = torch.empty(positions, width, dtype=ctx.position_dtype, device=grad.device)
        with use_device(grad.device):
            if plan.candidate_counts is not None:
                sums = torch.empty(samples, width, dtype=torch.float32, device=grad.device)
                launch_kernel(
                    sum_candidates_kernel, (samples,), grad, plan.samples(), sums, **shape
                )
            launch_kernel(
                position_gradient_kernel, (positions,),
                grad, plan.samples(), sums, out, samples, plan.longest_history, **shape,
            )  # fmt: skip
        return grad_x, out, None, None
