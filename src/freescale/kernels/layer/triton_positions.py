"""The inputs of the encoder as Triton kernels, for NVIDIA GPUs.

One launch forward, one backward, and one more each for dropout and for candidates. The gradient of
a position is a sum over the samples in their order, without sorting: the same inputs give the same
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.jit.launch import (
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    use_device,
)
from freescale.kernels.layer.reference import STREAM
from freescale.kernels.layer.triton import choose_draws
from freescale.kernels.row_sums.triton import sum_by_row

FORWARD, BACKWARD = RowLaunch(2048, 4, 4), RowLaunch(2048, 4, 4)


def add_positions(
    x: Tensor, position: Tensor, plan: TilePlan, keys: Tensor | None, *, scale: float = 1.0,
    keep: float = 1.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As the reference, with lengths and candidates from the plan."""
    require_gpu(x.device, "kernels.layer.reference")
    out, token_keys = _AddPositions.apply(  # type: ignore[no-untyped-call]
        x, position, plan, keys, float(scale), float(keep)
    )
    return out, token_keys


def add_encodings(
    x: Tensor, position: Tensor, time: Tensor, places: Tensor, buckets: Tensor,
    token_keys: Tensor | None, *, scale: float = 1.0, keep: float = 1.0,
) -> Tensor:  # fmt: skip
    """As the reference."""
    require_gpu(x.device, "kernels.layer.reference")
    drawn = None if keep == 1 else token_keys
    out: Tensor = _AddEncodings.apply(  # type: ignore[no-untyped-call]
        x, position, time, places, buckets, drawn, float(scale), float(keep)
    )
    return out


class _AddEncodings(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, position, time, places, buckets, token_keys, scale, keep):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_positions_kernels import add_encodings_kernel

        tokens, shape = x.shape[0], FORWARD.shape(x.shape[1])
        ctx.dtype, ctx.scale, ctx.keep = x.dtype, scale, keep
        ctx.counts = position.shape[0], time.shape[0]
        ctx.save_for_backward(places, buckets, token_keys)
        out = torch.empty(x.shape, dtype=position.dtype, device=x.device)
        with use_device(x.device):
            launch_kernel(
                add_encodings_kernel, (count_blocks(tokens, shape["R"]),),
                x.contiguous(), position.contiguous(), time.contiguous(), places, buckets,
                token_keys, out, tokens, scale, **choose_draws(STREAM, keep), **shape,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_positions_kernels import drop_gradient_kernel

        places, buckets, token_keys = ctx.saved_tensors
        grad, tokens, shape = grad.contiguous(), grad.shape[0], BACKWARD.shape(grad.shape[1])
        if token_keys is None:
            grad_x = torch.empty_like(grad, dtype=ctx.dtype)
            torch.mul(grad, ctx.scale, out=grad_x)  # rounded in passing
        else:
            dropped, grad_x = torch.empty_like(grad), torch.empty_like(grad, dtype=ctx.dtype)
            with use_device(grad.device):
                launch_kernel(
                    drop_gradient_kernel, (count_blocks(tokens, shape["R"]),),
                    grad, token_keys, dropped, grad_x, tokens, ctx.scale,
                    **choose_draws(STREAM, ctx.keep), **shape,
                )  # fmt: skip
            grad = dropped
        rows = (
            sum_by_row(grad, index.to(torch.int32), count)
            for index, count in zip((places, buckets), ctx.counts, strict=True)
        )
        return grad_x, *rows, *[None] * 5


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, position, plan, keys, scale, keep):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_positions_kernels import add_positions_kernel

        tokens, shape = x.shape[0], FORWARD.shape(x.shape[1])
        ctx.plan, ctx.dtype, ctx.scale, ctx.keep = plan, x.dtype, scale, keep
        ctx.shape, ctx.position_dtype = position.shape, position.dtype
        out = torch.empty(x.shape, dtype=position.dtype, device=x.device)
        token_keys, drops = None, keys is not None and keep < 1
        if keys is not None:
            token_keys = torch.empty(tokens, dtype=torch.int64, device=x.device)
            ctx.mark_non_differentiable(token_keys)
        samples = len(plan.host)
        with use_device(x.device):
            launch_kernel(
                add_positions_kernel, (count_blocks(tokens, shape["R"]),),
                x.contiguous(), position.contiguous(), None if keys is None else keys.contiguous(),
                plan.samples(), out, token_keys, tokens, samples, samples.bit_length(), scale,
                **choose_draws(STREAM, keep), DROPS=drops, **shape,
            )  # fmt: skip
        ctx.save_for_backward(*([token_keys] if drops else []))
        return out, token_keys

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_positions_kernels import (
            drop_gradient_kernel,
            position_gradient_kernel,
            sum_candidates_kernel,
        )

        plan, grad, (positions, width) = ctx.plan, grad.contiguous(), ctx.shape
        samples, shape, sums = len(plan.host), BACKWARD.shape(width), None
        grad_x, scales = None, ctx.needs_input_grad[0] and ctx.scale != 1
        if ctx.saved_tensors:
            dropped, tokens = torch.empty_like(grad), grad.shape[0]
            grad_x = torch.empty_like(grad, dtype=ctx.dtype) if scales else None
            with use_device(grad.device):
                launch_kernel(
                    drop_gradient_kernel, (count_blocks(tokens, shape["R"]),),
                    grad, *ctx.saved_tensors, dropped, grad_x, tokens, ctx.scale,
                    **choose_draws(STREAM, ctx.keep), **shape,
                )  # fmt: skip
            grad = dropped
        if ctx.needs_input_grad[0] and grad_x is None:
            grad_x = (grad * ctx.scale if scales else grad).to(ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, *[None] * 5
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
        return grad_x, out, *[None] * 4
