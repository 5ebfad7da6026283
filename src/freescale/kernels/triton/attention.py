"""Jagged SiLU attention of HSTU as Triton kernels: the twin of `reference.attention`, for NVIDIA
GPUs.

Same arguments, same function, memory linear in the tokens. float32, bfloat16 and float16, sums in
float32; head widths 32, 64 and 128. The kernels read the lengths from tables of tiles that
`attention_plan` makes once per batch; nothing synchronizes after that. No sum depends on an order
that may change: the same inputs give the same bits, gradients too. Adding the queries' gradients
with atomics in the kernel for keys was slower than a kernel of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.kernels.attention_checks import check_inputs, check_plan
from freescale.kernels.triton.attention_launch import (
    BACKWARD_KV,
    BACKWARD_Q,
    BIAS_SUMS,
    BIASED_FORWARD,
    BIASED_KV,
    BIASED_Q,
    FLOAT32_FORWARD,
    FLOAT32_KV,
    FLOAT32_PRECISION,
    FLOAT32_Q,
    FORWARD,
    TIMED_KV,
    TIMED_SUMS,
    AttentionLaunch,
)
from freescale.kernels.triton.attention_plan import TilePlan, plan_attention
from freescale.kernels.triton.launch import (
    Block,
    is_interpreted,
    launch_kernel,
    require_gpu,
    use_device,
)

WIDTHS = (32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hstu_attention(
    q: Tensor,  # [tokens, heads, d_qk]
    k: Tensor,  # [tokens, heads, d_qk]
    v: Tensor,  # [tokens, heads, d_v]
    lengths: Tensor,  # [samples] int64, candidates included
    *,
    scale_length: int,
    alpha: float,
    candidate_counts: Tensor | None = None,  # [samples] int64
    # [N], by the distance of two positions; N above the longest distance
    position_bias: Tensor | None = None,
    # [buckets + 1], by the logarithm of the time between two tokens
    time_bias: Tensor | None = None,
    timestamps: Tensor | None = None,  # [tokens] int64
    # of the same lengths, candidates and timestamps: saves making it per layer
    plan: TilePlan | None = None,
) -> Tensor:  # [tokens, heads, d_v]
    """SiLU attention over jagged samples, in the inputs' dtype; scores, SiLU and sums in
    float32."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v must share one dtype of {DTYPES}, not {q.dtype}, {k.dtype}, {v.dtype}"
        )
    check_inputs(q, k, v, lengths, position_bias, time_bias, timestamps, scale_length)
    if q.shape[2] not in WIDTHS or v.shape[2] not in WIDTHS:
        raise ValueError(
            f"the kernels are for heads {WIDTHS} wide, not {q.shape[2]} and "
            f"{v.shape[2]}; use kernels.attention"
        )
    if plan is None:
        plan = plan_attention(
            lengths,
            q.shape[1],
            candidate_counts=candidate_counts,
            timestamps=None if time_bias is None else timestamps,
            buckets=0 if time_bias is None else time_bias.numel() - 1,
            distances=position_bias is not None,
        )
    check_plan(plan, q, lengths, candidate_counts, position_bias, time_bias)
    require_gpu(q.device, "kernels.attention")
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, position_bias, time_bias, plan, float(alpha), float(scale_length)
    )
    return out


def make_readable(x: Tensor) -> Tensor:
    """Copies x [tokens, heads, d] unless descriptors can read it as it is: heads side by side, rows
    at multiples of 16 bytes. A slice of a wider projection is not copied."""
    heads, width = x.shape[1:]
    beside = x.stride(2) == 1 and (heads == 1 or x.stride(1) == width)
    if (
        beside
        and x.stride(0) >= heads * width
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    ):
        return x
    return x.contiguous()


def build_descriptor(x: Tensor, rows: int) -> Block:
    """What a TMA descriptor of x [tokens, heads, d] is made of, whose blocks are `rows` tokens of
    one head."""
    tokens, heads, width = x.shape
    return Block(x, [tokens, heads * width], [x.stride(0), 1], [rows, width])


class _Call:
    """What the launches of one attention have in common."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: tuple[Tensor | None, Tensor | None],
        plan: TilePlan,
        alpha: float,
    ):
        self.q, self.k, self.v, self.plan = q, k, v, plan
        position, time = (None if bias is None else bias.float().contiguous() for bias in biases)
        narrow, compiled = q.dtype != torch.float32, not is_interpreted()
        self.half_alpha = alpha / 2
        self.bias: dict[str, Any] = {
            "position_bias": position,
            "farthest": None if position is None else plan.longest_distance,
            "time_bias": time,
            "edges": None if time is None else plan.edges(),
            "times": None if time is None else plan.times,
            "buckets": None if time is None else plan.buckets,
        }
        self.constants = {
            "HEADS": q.shape[1],
            "D_QK": q.shape[2],
            "D_V": v.shape[2],
            "FAST": narrow and compiled,
            "INLINE": compiled,  # assembly
            # of float32 operands alone
            "PRECISION": FLOAT32_PRECISION if compiled and not narrow else "ieee",
            "CANDIDATES": plan.candidate_counts is not None,
        }
        width = max(q.shape[2], v.shape[2])
        if not narrow:
            self.launches = FLOAT32_FORWARD, FLOAT32_KV, FLOAT32_Q
        elif position is None and time is None:
            self.launches = FORWARD[width], BACKWARD_KV[width], BACKWARD_Q[width]
        else:
            self.launches = BIASED_FORWARD, BIASED_KV if time is None else TIMED_KV, BIASED_Q

    def forward(self, out: Tensor, scale: float) -> None:
        from freescale.kernels.triton.attention_kernels import forward_kernel

        launch = self.launches[0]
        tiles = self.plan.query_tiles(launch.tile)
        launch_kernel(
            forward_kernel,
            (len(tiles) * self.plan.heads,),
            build_descriptor(self.q, launch.tile),
            build_descriptor(self.k, launch.inner),
            build_descriptor(self.v, launch.inner),
            out,
            tiles,
            half_alpha=self.half_alpha,
            inverse_scale=1 / scale,
            M=launch.tile,
            N=launch.inner,
            **self._build_arguments(launch),
        )

    def backward_kv(self, grad: Tensor, grad_k: Tensor, grad_v: Tensor, scale: float) -> None:
        from freescale.kernels.triton.attention_kernels import backward_kv_kernel

        launch = self.launches[1]
        tiles = self.plan.key_tiles(launch.tile)
        launch_kernel(
            backward_kv_kernel,
            (len(tiles) * self.plan.heads,),
            build_descriptor(self.q, launch.inner),
            build_descriptor(self.k, launch.tile),
            build_descriptor(self.v, launch.tile),
            build_descriptor(grad, launch.inner),
            grad_k,
            grad_v,
            tiles,
            half_alpha=self.half_alpha,
            factor=self.half_alpha / scale,
            inverse_scale=1 / scale,
            M=launch.inner,
            N=launch.tile,
            **self._build_arguments(launch),
        )

    def backward_q(self, grad: Tensor, grad_q: Tensor, scale: float) -> None:
        from freescale.kernels.triton.attention_kernels import backward_q_kernel

        launch = self.launches[2]
        tiles = self.plan.query_tiles(launch.tile)
        launch_kernel(
            backward_q_kernel,
            (len(tiles) * self.plan.heads,),
            build_descriptor(self.q, launch.tile),
            build_descriptor(self.k, launch.inner),
            build_descriptor(self.v, launch.inner),
            build_descriptor(grad, launch.tile),
            grad_q,
            tiles,
            half_alpha=self.half_alpha,
            factor=self.half_alpha / scale,
            M=launch.tile,
            N=launch.inner,
            **self._build_arguments(launch),
        )

    def _build_arguments(self, launch: AttentionLaunch) -> dict[str, Any]:
        """What the kernels over tiles take besides their tensors."""
        return {
            **self.bias,
            **self.constants,
            "STAGES": launch.stages,
            "MASKED_STAGES": launch.masked_stages,
            "num_warps": launch.warps,
            "maxnreg": launch.registers,
        }

    def backward_bias(self, grad: Tensor, scale: float) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of both biases in float32: partial sums in memory, added up in a fixed
        order."""
        from freescale.kernels.triton.attention_kernels import (
            backward_bias_kernel,
            sum_distances_kernel,
        )

        position, time = self.bias["position_bias"], self.bias["time_bias"]
        launch = BIAS_SUMS if time is None else TIMED_SUMS
        size = launch.tile
        walks, pieces, counts = self.plan.walks(size)
        empty = grad.new_empty
        candidates = self.plan.candidate_counts is not None
        bins = 1 << self.plan.buckets.bit_length()  # at least buckets + 1
        by_distance = None if position is None else empty(len(walks), 2 * size, dtype=torch.float32)
        by_key = (
            None
            if position is None or not candidates
            else empty(self.plan.tokens, dtype=torch.float32)
        )
        by_self = None if by_key is None else grad.new_zeros(len(walks), dtype=torch.float32)
        by_bucket = None if time is None else empty(len(walks), bins, dtype=torch.float32)
        launch_kernel(
            backward_bias_kernel,
            (len(walks),),
            *(build_descriptor(x, size) for x in (self.q, self.k, self.v, grad)),
            walks,
            by_distance,
            by_key,
            by_self,
            by_bucket,
            half_alpha=self.half_alpha,
            factor=0.5 / scale,
            B=size,
            BUCKETS=bins,
            STAGES=launch.stages,
            num_warps=launch.warps,
            maxnreg=launch.registers,
            **self.bias,
            **self.constants,
        )
        grad_position = grad_time = None
        if position is not None:
            grad_position = torch.zeros_like(position)
            launch_kernel(
                sum_distances_kernel,
                (len(counts),),
                by_distance,
                by_key,
                pieces,
                counts,
                grad_position,
                position.numel(),
                B=size,
                S=32,
                num_warps=4,
            )
            if by_self is not None:
                grad_position[:1] += by_self.sum()
        if by_bucket is not None:
            grad_time = by_bucket.sum(0)[: self.plan.buckets + 1]
        return grad_position, grad_time


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: tuple[Tensor | None, Tensor | None],  # by position, by time
    plan: TilePlan,
    alpha: float,
    scale: float,
) -> Tensor:
    """The attention without checks and without autograd; inputs that `make_readable` leaves."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if plan.tokens:
        with use_device(q.device):
            _Call(q, k, v, biases, plan, alpha).forward(out, scale)
    return out


def differentiate_attention(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    plan: TilePlan,
    alpha: float,
    scale: float,
    *,
    need_biases: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and both biases for that of what `attend` returned."""
    grad = make_readable(grad)
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    grad_position, grad_time = (None if b is None else torch.zeros_like(b) for b in biases)
    if not plan.tokens:
        return grad_q, grad_k, grad_v, grad_position, grad_time
    with use_device(q.device):
        call = _Call(q, k, v, biases, plan, alpha)
        call.backward_kv(grad, grad_k, grad_v, scale)
        call.backward_q(grad, grad_q, scale)
        if need_biases:
            sums = call.backward_bias(grad, scale)
            grad_position, grad_time = (
                None if x is None or bias is None else x.to(bias.dtype)
                for x, bias in zip(sums, biases, strict=True)
            )
    return grad_q, grad_k, grad_v, grad_position, grad_time


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, position_bias, time_bias, plan, alpha, scale):  # type: ignore[no-untyped-def]
        q, k, v = make_readable(q), make_readable(k), make_readable(v)
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.options = plan, alpha, scale
        return attend(q, k, v, (position_bias, time_bias), plan, alpha, scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, *biases = ctx.saved_tensors
        need = any(ctx.needs_input_grad[3:5])
        grads = differentiate_attention(
            grad, q, k, v, tuple(biases), *ctx.options, need_biases=need
        )
        return *grads, None, None, None
