"""Jagged SiLU attention of HSTU as Triton kernels, for NVIDIA GPUs.

The same function as `attention.reference`, in float32, bfloat16 and float16 with sums in float32.
The kernels have heads 32, 64, 128 and, except in float32, 256 wide. Heads of other widths are
padded with zeros, which change no product, and the outputs are cut. The kernels read the lengths
from the tables of a `TilePlan`, made once per batch; nothing synchronizes after that. Sums have a
fixed order: the same inputs give the same bits, including gradients.

Memory is linear in the tokens, except for tables with an entry per pair of tokens. With 16-bit
inputs a call makes one of the biases of pairs if it fits the budget. Above it the kernels compute
them, several times each. Backward reads the table of forward if that is small. The gradient of a
bias by distance takes two numbers for every 64 pairs of each head.

`softmax_attention` has the same kernels. Its dropout draws from the queries' keys, as the reference
does, in forward and again in backward.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.kernels.attention.checks import check_or_plan
from freescale.kernels.attention.plan_columns import PAIR_KEYS, PAIR_QUERIES
from freescale.kernels.attention.triton_launch import (
    BUDGET_SHARE,
    FLOAT32_PRECISION,
    KEPT_SHARE,
    PAIR_BIAS,
    PAIR_BUDGET,
    AttentionLaunch,
    KeyLaunch,
    choose_launches,
)
from freescale.kernels.attention.triton_plan import TilePlan, plan_attention
from freescale.kernels.jit.launch import (
    count_blocks,
    is_interpreted,
    is_recording,
    launch_kernel,
    require_gpu,
    use_device,
)
from freescale.kernels.jit.launch_plan import Block
from freescale.random import compute_keep_threshold

WIDTHS = (32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_WIDTHS = WIDTHS[:-1]  # tiles of wider heads do not fit on an SM
OUTPUT_ELEMENTS = 4096  # elements of the output that a program multiplies
# Sums by distance: distances and tiles of a program, and programs that share the tiles.
SUM_DISTANCES, SUM_TILES, SUM_SPLIT = 64, 32, 8
PAIR_BYTES = 2  # of a number in a table over pairs of tokens

Biases = tuple[Tensor | None, Tensor | None]  # by position, by time


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


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, *, alpha: float,
    dropout: WeightDropout | None = None,
) -> Tensor:  # fmt: skip
    """As `attention.softmax`, with scores, softmax and sums in float32."""
    padded = (pad_heads(x) for x in (q, k, v))
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        *padded, None, None, plan, float(alpha), 1.0, Softmax(dropout)
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


class WeightDropout(NamedTuple):
    """Dropout of an attention's weights."""

    keys: Tensor  # [tokens] int64: random keys
    stream: int  # number of the draw from a key; each layer has its own
    keep: float  # share of the weights that is kept


class Softmax(NamedTuple):
    """Softmax instead of SiLU."""

    dropout: WeightDropout | None


class Forward(NamedTuple):
    """What backward reads of a forward."""

    out: Tensor  # [tokens, heads, d_v]; read by the backward of a softmax alone
    pairs: Tensor | None  # the table of pair biases
    logarithms: Tensor | None  # [heads, tokens] float32: of a softmax's sums, in powers of two


class _Call:
    """The launches of one attention and their common arguments."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, biases: Biases, plan: TilePlan, alpha: float,
        budget: int,  # most pairs of a table
        softmax: Softmax | None = None, pairs: Tensor | None = None,
    ):  # fmt: skip
        self.q, self.k, self.v, self.plan, self.softmax = q, k, v, plan, softmax
        position, time = (None if bias is None else bias.float().contiguous() for bias in biases)
        self.factor = alpha if softmax else alpha / 2  # factor of the gradients of queries and keys
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
        visible = plan.visible
        self.seen: dict[str, Any] = {
            "first": None if visible is None else visible.first,
            "last": None if visible is None else visible.last,
        }
        dropout = softmax and softmax.dropout
        self.shared: dict[str, Any] = {
            **self.bias, **self.constants, **self.seen,
            "SOFTMAX": softmax is not None,
            "score_factor": alpha * math.log2(math.e) if softmax else self.factor,
            "tokens": plan.tokens,
            "keys": dropout.keys if dropout else None,
            "layer": dropout.stream if dropout else None,
            "threshold": compute_keep_threshold(dropout.keep) if dropout else None,
            "share": 1 / dropout.keep if dropout else None,
        }  # fmt: skip
        self.width = max(q.shape[2], v.shape[2])
        narrow, size = q.dtype != torch.float32, plan.pair_blocks * PAIR_QUERIES * PAIR_KEYS
        self.launches = choose_launches(
            self.width, narrow=narrow, biased=position is not None or time is not None,
            timed=time is not None, tabled=size <= budget, softmax=softmax is not None,
            visible=visible is not None,
        )  # fmt: skip
        self.pairs = pairs
        if pairs is None and self.launches.tabled:
            self.pairs = self._compute_pair_biases()

    def _compute_pair_biases(self) -> Tensor:
        """Half the bias of every pair of tokens [blocks * PAIR_QUERIES, PAIR_KEYS] float16,
        computed once for all heads and kernels."""
        from freescale.kernels.attention.triton_bias_kernels import pair_bias_kernel

        rows = self.plan.pair_blocks * PAIR_QUERIES
        pairs = torch.empty(rows, PAIR_KEYS, dtype=torch.float16, device=self.q.device)
        launch = PAIR_BIAS
        tiles = self.plan.query_tiles(launch.queries)
        launch_kernel(
            pair_bias_kernel, (len(tiles), launch.split), pairs, tiles, **self.bias, **self.seen,
            M=launch.queries, INLINE=self.constants["INLINE"], SPLIT=launch.split,
            num_warps=launch.warps,
        )  # fmt: skip
        return pairs

    def forward(self, scale: float) -> Forward:
        from freescale.kernels.attention.triton_kernels import forward_kernel

        launch, v = self.launches.forward, self.v
        tiles = self.plan.query_tiles(launch.tile)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        logarithms = self._allocate_of_queries() if self.softmax else None
        launch_kernel(
            forward_kernel, (len(tiles) * self.plan.heads,), build_descriptor(self.q, launch.tile),
            build_descriptor(self.k, launch.inner), build_descriptor(v, launch.inner),
            _describe_table(self.pairs, launch.tile, launch.inner), out, logarithms, tiles,
            inverse_scale=1 / scale, M=launch.tile, N=launch.inner,
            **self._build_arguments(launch),
        )  # fmt: skip
        pairs = self.pairs
        if pairs is not None and pairs.numel() > _find_budget(v.device, KEPT_SHARE):
            pairs = None
        return Forward(out, pairs, logarithms)

    def _allocate_of_queries(self) -> Tensor:
        return self.q.new_empty(self.plan.heads, self.plan.tokens, dtype=torch.float32)

    def backward(
        self, grad: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, scale: float,
        forward: Forward, *, need_biases: bool,
    ) -> Biases:  # fmt: skip
        """Writes the gradients of q, k and v. Returns those of both biases in float32, if they are
        needed. `forward`: of a softmax."""
        of_queries: Biases = (None, None)
        if forward.logarithms is not None:
            of_queries = forward.logarithms, self._multiply_outputs(grad, forward.out)
        for launch in self.launches.of_keys:
            self.backward_kv(launch, grad, grad_k, grad_v, scale, of_queries)
        return self.backward_q(grad, grad_q, scale, of_queries, need_biases=need_biases)

    def _multiply_outputs(self, grad: Tensor, out: Tensor) -> Tensor:
        from freescale.kernels.attention.triton_kernels import output_products_kernel

        along, width = self._allocate_of_queries(), out.shape[2]
        rows = OUTPUT_ELEMENTS // width
        launch_kernel(
            output_products_kernel, (count_blocks(self.plan.tokens, rows), self.plan.heads),
            grad.contiguous(), out, along, self.plan.tokens, HEADS=self.plan.heads, D=width, M=rows,
            num_warps=4,
        )  # fmt: skip
        return along

    def backward_kv(
        self, launch: KeyLaunch, grad: Tensor, grad_k: Tensor, grad_v: Tensor, scale: float,
        of_queries: Biases,
    ) -> None:  # fmt: skip
        from freescale.kernels.attention.triton_kernels import backward_kv_kernel

        tiles = self.plan.key_tiles(launch.tile)
        launch_kernel(
            backward_kv_kernel, (len(tiles) * self.plan.heads,),
            build_descriptor(self.q, launch.inner), build_descriptor(self.k, launch.tile),
            build_descriptor(self.v, launch.tile), build_descriptor(grad, launch.inner),
            _describe_table(self.pairs, launch.inner, launch.tile), *of_queries, grad_k, grad_v,
            tiles, factor=self.factor / scale, inverse_scale=1 / scale, M=launch.inner,
            N=launch.tile, KEYS=launch.keys, VALUES=launch.values, STRIDE_K=grad_k.stride(0),
            STRIDE_V=grad_v.stride(0), **self._build_arguments(launch),
        )  # fmt: skip

    def backward_q(
        self, grad: Tensor, grad_q: Tensor, scale: float, of_queries: Biases, *, need_biases: bool
    ) -> Biases:
        """Returns the gradients of both biases in float32, if they are needed."""
        from freescale.kernels.attention.triton_kernels import backward_q_kernel

        plan, constants, launch = self.plan, self.constants, self.launches.of_queries
        position, time = (
            self.bias[name] if need_biases else None for name in ("position_bias", "time_bias")
        )
        tiles = plan.query_tiles(launch.tile)
        programs = len(tiles) * plan.heads
        parts = launch.tile // launch.inner + 1 + constants["CANDIDATES"]
        plane = parts * plan.count_sums(launch.tile)
        by_distance = by_self = by_bucket = None
        wide: dict[str, Any] = {"dtype": torch.float32, "device": grad.device}
        if position is not None:
            # tiles that are not visited have no sums
            whole = parts == 2 and plan.visible is None
            make = torch.empty if whole else torch.zeros
            by_distance = make(plan.heads * plane, **wide)
            if constants["CANDIDATES"]:
                by_self = torch.zeros(plan.heads, plan.tokens, **wide)
        bins = 0
        if time is not None:
            bins = 1 << plan.buckets.bit_length()  # at least buckets + 1
            by_bucket = torch.empty(programs, bins, **wide)
        launch_kernel(
            backward_q_kernel, (programs,),
            build_descriptor(self.q, launch.tile), build_descriptor(self.k, launch.inner),
            build_descriptor(self.v, launch.inner), build_descriptor(grad, launch.tile),
            _describe_table(self.pairs, launch.tile, launch.inner), *of_queries, by_distance,
            by_self, by_bucket, plane, grad_q, tiles, factor=self.factor / scale, M=launch.tile,
            N=launch.inner, BUCKETS=bins, STRIDE=grad_q.stride(0), **self._build_arguments(launch),
        )  # fmt: skip
        half = 0.5 / scale
        grad_time = None if by_bucket is None else by_bucket.sum(0)[: plan.buckets + 1] * half
        if by_distance is None or position is None:
            return None, grad_time
        from freescale.kernels.attention.triton_bias_sums_kernels import sum_distances_kernel

        size = position.numel()
        sums = torch.empty(plan.heads * SUM_SPLIT, size, **wide)
        launch_kernel(
            sum_distances_kernel, (count_blocks(size, SUM_DISTANCES), len(sums)), by_distance,
            tiles, plane, len(tiles), sums, size, half, HEADS=plan.heads, M=launch.tile,
            N=launch.inner, CANDIDATES=constants["CANDIDATES"], SPLIT=SUM_SPLIT, S=SUM_TILES,
            D=SUM_DISTANCES, num_warps=4,
        )  # fmt: skip
        grad_position = sums.sum(0)
        if by_self is not None:
            grad_position[:1] += by_self.sum() * half
        return grad_position, grad_time

    def _build_arguments(self, launch: AttentionLaunch) -> dict[str, Any]:
        """The arguments of the kernels over tiles that are not tensors."""
        return {
            **self.shared,
            "STAGES": launch.stages,
            "MASKED_STAGES": launch.masked_stages,
            "num_warps": launch.warps,
            "maxnreg": launch.registers,
        }


def _find_budget(device: torch.device, share: float) -> int:
    """Most pairs of a table that may take this share of the memory that the process may use."""
    if device.type != "cuda":
        return PAIR_BUDGET
    usable = torch.cuda.get_per_process_memory_fraction(device)
    usable *= torch.cuda.get_device_properties(device).total_memory
    return min(PAIR_BUDGET, int(share * usable) // PAIR_BYTES)


def _list_budgets(device: torch.device) -> tuple[int, ...]:
    """Most pairs of a table. When recording, both cases that a batch may meet: memory for the
    table, and none."""
    return (PAIR_BUDGET, 0) if is_recording() else (_find_budget(device, BUDGET_SHARE),)


def attend(
    q: Tensor, k: Tensor, v: Tensor, biases: Biases, plan: TilePlan, alpha: float, scale: float,
    softmax: Softmax | None = None,
) -> Forward:  # fmt: skip
    """The attention without checks and without autograd, for inputs that `make_readable` does not
    copy."""
    found = Forward(torch.empty(v.shape, dtype=v.dtype, device=v.device), None, None)
    if plan.tokens:
        with use_device(q.device):
            for budget in _list_budgets(q.device):
                found = _Call(q, k, v, biases, plan, alpha, budget, softmax).forward(scale)
    return found


def differentiate_attention(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, biases: Biases, plan: TilePlan, alpha: float,
    scale: float, softmax: Softmax | None = None, *, forward: Forward, need_biases: bool,
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
        for budget in _list_budgets(q.device):
            pairs = None if is_recording() else forward.pairs
            call = _Call(q, k, v, biases, plan, alpha, budget, softmax, pairs)
            grads = grad_q, grad_k, grad_v
            sums = call.backward(grad, *grads, scale, forward, need_biases=need_biases)
        grad_position, grad_time = (
            zeros if x is None or zeros is None else x.to(zeros.dtype)
            for x, zeros in zip(sums, (grad_position, grad_time), strict=True)
        )
    return grad_q, grad_k, grad_v, grad_position, grad_time


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, position_bias, time_bias, *options):  # type: ignore[no-untyped-def]
        q, k, v = make_readable(q), make_readable(k), make_readable(v)
        found = attend(q, k, v, (position_bias, time_bias), *options)
        read = found.out if found.logarithms is not None else q  # out is not kept for SiLU
        ctx.save_for_backward(q, k, v, position_bias, time_bias, read, *found[1:])
        ctx.options = options
        return found.out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, position_bias, time_bias, *found = ctx.saved_tensors
        need = any(ctx.needs_input_grad[3:5])
        grads = differentiate_attention(
            grad, q, k, v, (position_bias, time_bias), *ctx.options, forward=Forward(*found),
            need_biases=need,
        )  # fmt: skip
        return *grads, *[None] * len(ctx.options)
