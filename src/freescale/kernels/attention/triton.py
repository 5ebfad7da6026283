"""Jagged SiLU attention of HSTU as Triton kernels, for NVIDIA GPUs.

The same function as `attention.reference`, in float32, bfloat16 and float16 with sums in float32.
The kernels have heads 32, 64, 128 and, except in float32, 256 wide. Heads of other widths are
padded with zeros, which change no product, and the outputs are cut. The kernels read the lengths
from the tables of a `TilePlan`, made once per batch; nothing synchronizes after that. Sums have a
fixed order: the same inputs give the same bits, including gradients.

Memory is linear in the tokens, except for tables with an entry per pair of tokens. With 16-bit
inputs a call makes these if they fit PAIR_BUDGET: the biases of pairs, and in some backwards the
scores of each head. Above the budget the kernels compute both, several times each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.kernels.attention.checks import check_or_plan
from freescale.kernels.attention.plan_columns import PAIR_KEYS, PAIR_QUERIES
from freescale.kernels.attention.triton_launch import (
    BIAS_SUMS,
    FLOAT32_PRECISION,
    PAIR_BIAS,
    PAIR_BUDGET,
    STORED_SUMS,
    AttentionLaunch,
    KeyLaunch,
    choose_launches,
)
from freescale.kernels.attention.triton_plan import TilePlan, plan_attention
from freescale.kernels.jit.launch import (
    is_interpreted,
    is_recording,
    launch_kernel,
    require_gpu,
    use_device,
)
from freescale.kernels.jit.launch_plan import Block

WIDTHS = (32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_WIDTHS = WIDTHS[:-1]  # tiles of wider heads do not fit on an SM


def find_kernel_width(width: int, dtype: torch.dtype) -> int | None:
    """The narrowest width of the kernels that fits heads of this width; None if there is none."""
    widths = FLOAT32_WIDTHS if dtype == torch.float32 else WIDTHS
    return next((own for own in widths if width <= own), None)


def pad_heads(x: Tensor) -> Tensor:
    """Pads x [tokens, heads, d] with zeros to the width of the kernels, which must exist."""
    width = find_kernel_width(x.shape[2], x.dtype)
    assert width is not None
    return x if width == x.shape[2] else torch.nn.functional.pad(x, (0, width - x.shape[2]))


def cut_heads(x: Tensor, width: int) -> Tensor:
    """The inverse of `pad_heads`."""
    return x if width == x.shape[2] else x[..., :width].contiguous()


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale_length: int, alpha: float,
    candidate_counts: Tensor | None = None, position_bias: Tensor | None = None,
    time_bias: Tensor | None = None, timestamps: Tensor | None = None,
    plan: TilePlan | None = None,
) -> Tensor:  # fmt: skip
    """As the reference, with scores, SiLU and sums in float32."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v must share one dtype of {DTYPES}, not {q.dtype}, {k.dtype}, {v.dtype}"
        )
    plan = check_or_plan(
        plan, plan_attention, q, k, v, lengths, scale_length, candidate_counts, position_bias,
        time_bias, timestamps,
    )  # fmt: skip
    if any(find_kernel_width(x.shape[2], x.dtype) is None for x in (q, v)):
        raise ValueError(
            f"the kernels are for heads up to {WIDTHS[-1]} wide (float32: {FLOAT32_WIDTHS[-1]}), "
            f"not {q.shape[2]} and {v.shape[2]}; use kernels.attention.reference"
        )
    require_gpu(q.device, "kernels.attention.reference")
    padded = (pad_heads(x) for x in (q, k, v))
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        *padded, position_bias, time_bias, plan, float(alpha), float(scale_length)
    )
    return cut_heads(out, v.shape[2])


def make_readable(x: Tensor) -> Tensor:
    """Copies x [tokens, heads, d] unless descriptors can read it: adjacent heads, rows aligned to
    16 bytes. A slice of a wider projection is not copied."""
    heads, width = x.shape[1:]
    adjacent = x.stride(2) == 1 and (heads == 1 or x.stride(1) == width)
    separate = x.stride(0) >= heads * width
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if adjacent and separate and aligned else x.contiguous()


def build_descriptor(x: Tensor, rows: int) -> Block:
    """Describes x [tokens, heads, d] for TMA, in blocks of `rows` tokens of one head."""
    tokens, heads, width = x.shape
    return Block(x, [tokens, heads * width], [x.stride(0), 1], [rows, width])


def _describe_table(table: Tensor | None, queries: int, keys: int) -> Block | None:
    """Describes a table over pairs of tokens, in tiles; None without one."""
    if table is None:
        return None
    return Block(table, [*table.shape], [*table.stride()], [queries, keys])


def choose_constants(q: Tensor, v: Tensor) -> dict[str, Any]:
    """Constants of all kernels for these queries and values [tokens, heads, d]."""
    narrow, compiled = q.dtype != torch.float32, not is_interpreted()
    return {
        "HEADS": q.shape[1],
        "D_QK": q.shape[2],
        "D_V": v.shape[2],
        "FAST": narrow and compiled,
        # of float32 operands only
        "PRECISION": FLOAT32_PRECISION if compiled and not narrow else "ieee",
    }


class _Call:
    """The launches of one attention and their common arguments."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, biases: tuple[Tensor | None, Tensor | None],
        plan: TilePlan, alpha: float, budget: int,  # most pairs of a table
    ):  # fmt: skip
        self.q, self.k, self.v, self.plan = q, k, v, plan
        position, time = (None if bias is None else bias.float().contiguous() for bias in biases)
        self.half_alpha = alpha / 2
        self.bias: dict[str, Any] = {
            "position_bias": position,
            "farthest": None if position is None else plan.longest_distance,
            "time_bias": time,
            "edges": None if time is None else plan.edges(),
            "times": None if time is None else plan.times,
            "buckets": None if time is None else plan.buckets,
        }
        self.constants = choose_constants(q, v) | {
            "INLINE": not is_interpreted(),  # assembly
            "CANDIDATES": plan.candidate_counts is not None,
        }
        self.width = max(q.shape[2], v.shape[2])
        narrow, pairs = q.dtype != torch.float32, plan.pair_blocks * PAIR_QUERIES * PAIR_KEYS
        self.launches = choose_launches(
            self.width, narrow=narrow, biased=position is not None or time is not None,
            timed=time is not None, tabled=pairs <= budget,
        )  # fmt: skip
        self.pairs = self._compute_pair_biases() if self.launches.tabled else None
        self.stores = narrow and q.shape[1] * pairs <= budget  # whether scores fit

    def _compute_pair_biases(self) -> Tensor:
        """Half the bias of every pair of tokens [blocks * PAIR_QUERIES, PAIR_KEYS] float16,
        computed once for all heads and kernels."""
        from freescale.kernels.attention.triton_bias_kernels import pair_bias_kernel

        rows = self.plan.pair_blocks * PAIR_QUERIES
        pairs = torch.empty(rows, PAIR_KEYS, dtype=torch.float16, device=self.q.device)
        launch = PAIR_BIAS
        tiles = self.plan.query_tiles(launch.queries)
        launch_kernel(
            pair_bias_kernel, (len(tiles), launch.split), pairs, tiles, **self.bias,
            M=launch.queries, INLINE=self.constants["INLINE"], SPLIT=launch.split,
            num_warps=launch.warps,
        )  # fmt: skip
        return pairs

    def forward(self, out: Tensor, scale: float) -> None:
        from freescale.kernels.attention.triton_kernels import forward_kernel

        launch = self.launches.forward
        tiles = self.plan.query_tiles(launch.tile)
        launch_kernel(
            forward_kernel, (len(tiles) * self.plan.heads,), build_descriptor(self.q, launch.tile),
            build_descriptor(self.k, launch.inner), build_descriptor(self.v, launch.inner),
            _describe_table(self.pairs, launch.tile, launch.inner), out, tiles,
            half_alpha=self.half_alpha, inverse_scale=1 / scale, M=launch.tile, N=launch.inner,
            **self._build_arguments(launch),
        )  # fmt: skip

    def backward(
        self, grad: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, scale: float, *,
        need_biases: bool,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Writes the gradients of q, k and v. Returns those of both biases in float32, if they are
        needed."""
        stored = self.launches.stored if self.stores else None
        changes = self._allocate_stored() if stored or need_biases and self.stores else None
        if stored is not None and changes is not None:
            weights = self._allocate_stored()
            self.backward_q(stored.q, grad, grad_q, scale, weights, changes)
            self.backward_stored(stored.kv, weights, grad, grad_v, 1 / scale)
            del weights
            self.backward_stored(stored.kv, changes, self.q, grad_k, self.half_alpha / scale)
        else:
            for launch in self.launches.of_keys:
                self.backward_kv(launch, grad, grad_k, grad_v, scale)
            self.backward_q(self.launches.of_queries, grad, grad_q, scale, None, changes)
        return self.backward_bias(grad, scale, changes) if need_biases else (None, None)

    def _allocate_stored(self) -> Tensor:
        """Allocates one number per head and pair of tokens, in square blocks."""
        rows = self.plan.pair_blocks // 2 * self.plan.heads * PAIR_QUERIES
        return torch.empty(rows, PAIR_QUERIES, dtype=self.q.dtype, device=self.q.device)

    def backward_stored(
        self, launch: AttentionLaunch, stored: Tensor, rows: Tensor, out: Tensor, factor: float
    ) -> None:
        from freescale.kernels.attention.triton_kernels import backward_stored_kernel

        tiles = self.plan.key_tiles(launch.tile)
        launch_kernel(
            backward_stored_kernel, (len(tiles) * self.plan.heads,),
            _describe_table(stored, launch.inner, launch.tile),
            build_descriptor(rows, launch.inner), out, tiles, factor, HEADS=self.constants["HEADS"],
            D=rows.shape[2], M=launch.inner, N=launch.tile, CANDIDATES=self.constants["CANDIDATES"],
            STAGES=launch.stages, MASKED_STAGES=launch.masked_stages, STRIDE=out.stride(0),
            num_warps=launch.warps, maxnreg=launch.registers,
        )  # fmt: skip

    def backward_kv(
        self, launch: KeyLaunch, grad: Tensor, grad_k: Tensor, grad_v: Tensor, scale: float
    ) -> None:
        from freescale.kernels.attention.triton_kernels import backward_kv_kernel

        tiles = self.plan.key_tiles(launch.tile)
        launch_kernel(
            backward_kv_kernel, (len(tiles) * self.plan.heads,),
            build_descriptor(self.q, launch.inner), build_descriptor(self.k, launch.tile),
            build_descriptor(self.v, launch.tile), build_descriptor(grad, launch.inner),
            _describe_table(self.pairs, launch.inner, launch.tile), grad_k, grad_v, tiles,
            half_alpha=self.half_alpha, factor=self.half_alpha / scale, inverse_scale=1 / scale,
            M=launch.inner, N=launch.tile, KEYS=launch.keys, VALUES=launch.values,
            STRIDE_K=grad_k.stride(0), STRIDE_V=grad_v.stride(0),
            **self._build_arguments(launch),
        )  # fmt: skip

    def backward_q(
        self, launch: AttentionLaunch, grad: Tensor, grad_q: Tensor, scale: float,
        weights: Tensor | None, changes: Tensor | None,
    ) -> None:  # fmt: skip
        from freescale.kernels.attention.triton_kernels import backward_q_kernel

        tiles = self.plan.query_tiles(launch.tile)
        launch_kernel(
            backward_q_kernel, (len(tiles) * self.plan.heads,),
            build_descriptor(self.q, launch.tile), build_descriptor(self.k, launch.inner),
            build_descriptor(self.v, launch.inner), build_descriptor(grad, launch.tile),
            _describe_table(self.pairs, launch.tile, launch.inner),
            _describe_table(weights, launch.tile, launch.inner),
            _describe_table(changes, launch.tile, launch.inner), grad_q, tiles,
            half_alpha=self.half_alpha, factor=self.half_alpha / scale, M=launch.tile,
            N=launch.inner, STRIDE=grad_q.stride(0), **self._build_arguments(launch),
        )  # fmt: skip

    def _build_arguments(self, launch: AttentionLaunch) -> dict[str, Any]:
        """The arguments of the kernels over tiles that are not tensors."""
        return {
            **self.bias,
            **self.constants,
            "STAGES": launch.stages,
            "MASKED_STAGES": launch.masked_stages,
            "num_warps": launch.warps,
            "maxnreg": launch.registers,
        }

    def backward_bias(
        self, grad: Tensor, scale: float, changes: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of both biases in float32: partial sums in memory, added in a fixed order."""
        from freescale.kernels.attention.triton_bias_kernels import (
            backward_bias_kernel,
            sum_distances_kernel,
        )

        position, time = self.bias["position_bias"], self.bias["time_bias"]
        launch = BIAS_SUMS[self.width] if changes is None else STORED_SUMS
        size = launch.tile
        walks, pieces, counts = self.plan.walks(size)
        bins = 1 << self.plan.buckets.bit_length()  # at least buckets + 1
        inputs: list[Block | None] = [None] * 4
        if changes is None:
            inputs = [build_descriptor(x, size) for x in (self.q, self.k, self.v, grad)]
        by_distance = by_key = by_self = by_bucket = None
        if position is not None:
            by_distance = grad.new_empty(len(walks), 2 * size, dtype=torch.float32)
            if self.plan.candidate_counts is not None:
                by_key = grad.new_empty(self.plan.tokens, dtype=torch.float32)
                by_self = grad.new_zeros(len(walks), dtype=torch.float32)
        if time is not None:
            by_bucket = grad.new_empty(len(walks), bins, dtype=torch.float32)
        launch_kernel(
            backward_bias_kernel, (len(walks),), *inputs,
            _describe_table(self.pairs if changes is None else None, size, size),
            _describe_table(changes, size, size), walks, by_distance, by_key, by_self, by_bucket,
            half_alpha=self.half_alpha, factor=0.5 / scale, B=size, BUCKETS=bins,
            STAGES=launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
            **self.bias, **self.constants,
        )  # fmt: skip
        grad_position = grad_time = None
        if position is not None:
            grad_position = torch.zeros_like(position)
            launch_kernel(
                sum_distances_kernel, (len(counts),), by_distance, by_key, pieces, counts,
                grad_position, position.numel(), B=size, S=32, num_warps=4,
            )  # fmt: skip
            if by_self is not None:
                grad_position[:1] += by_self.sum()
        if by_bucket is not None:
            grad_time = by_bucket.sum(0)[: self.plan.buckets + 1]
        return grad_position, grad_time


def _list_budgets(plan: TilePlan) -> tuple[int, ...]:
    """Most pairs of a table. When recording, all the cases that a batch may meet: memory for all
    tables, only for the biases of pairs, and for none."""
    if not is_recording():
        return (PAIR_BUDGET,)
    return PAIR_BUDGET, plan.pair_blocks * PAIR_QUERIES * PAIR_KEYS, 0


def attend(
    q: Tensor, k: Tensor, v: Tensor,
    biases: tuple[Tensor | None, Tensor | None],  # by position, by time
    plan: TilePlan, alpha: float, scale: float,
) -> Tensor:  # fmt: skip
    """The attention without checks and without autograd, for inputs that `make_readable` does not
    copy."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if plan.tokens:
        with use_device(q.device):
            for budget in _list_budgets(plan):
                _Call(q, k, v, biases, plan, alpha, budget).forward(out, scale)
    return out


def differentiate_attention(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, biases: tuple[Tensor | None, Tensor | None],
    plan: TilePlan, alpha: float, scale: float, *, need_biases: bool,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and both biases from that of the output of `attend`. Writes the first
    three `into` tensors [tokens, heads, d], such as columns of a wider one, if they are given."""
    grad = make_readable(grad)
    grad_q, grad_k, grad_v = into or (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    grad_position, grad_time = (None if b is None else torch.zeros_like(b) for b in biases)
    if not plan.tokens:
        return grad_q, grad_k, grad_v, grad_position, grad_time
    with use_device(q.device):
        for budget in _list_budgets(plan):
            call = _Call(q, k, v, biases, plan, alpha, budget)
            sums = call.backward(grad, grad_q, grad_k, grad_v, scale, need_biases=need_biases)
        grad_position, grad_time = (
            zeros if x is None or zeros is None else x.to(zeros.dtype)
            for x, zeros in zip(sums, (grad_position, grad_time), strict=True)
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
