"""Jagged SiLU attention of HSTU as Triton kernels: the twin of `reference.attention`, for NVIDIA
GPUs.

Same arguments, same function. float32, bfloat16 and float16, sums in float32; heads 32, 64, 128
and, but in float32, 256 wide; zeros fill up heads of other widths, which changes nothing: they add
nothing to a product, and what they become is cut off. The kernels read the lengths from tables of
tiles that `attention_plan` makes once per batch; nothing synchronizes after that. No sum depends on
an order that may change: the same inputs give the same bits, gradients too.

Memory is linear in the tokens but for tables with an entry for every pair of tokens, which narrow
dtypes make for one call if they fit PAIR_BUDGET: the biases of pairs, and in some backwards what
heads have for scores. Beyond the budget the kernels compute both, several times each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.kernels.attention.checks import check_inputs, check_plan
from freescale.kernels.attention.plan_columns import PAIR_KEYS, PAIR_QUERIES
from freescale.kernels.attention.triton_launch import (
    BACKWARD_KV,
    BACKWARD_Q,
    BIAS_SUMS,
    BIASED_FORWARD,
    BIASED_KV,
    BIASED_Q,
    BIASED_STORED,
    COMPUTED_FORWARD,
    COMPUTED_KV,
    COMPUTED_Q,
    COMPUTED_WIDE_KV,
    FLOAT32_FORWARD,
    FLOAT32_KV,
    FLOAT32_PRECISION,
    FLOAT32_Q,
    FORWARD,
    PAIR_BIAS,
    PAIR_BUDGET,
    STORED,
    STORED_SUMS,
    TIMED_KV,
    AttentionLaunch,
    KeyLaunch,
    StoredLaunch,
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
FLOAT32_WIDTHS = WIDTHS[:-1]  # tiles of wider heads do not fit in a multiprocessor


def find_kernel_width(width: int, dtype: torch.dtype) -> int | None:
    """The narrowest that the kernels have and that heads of this width fit in; None if none is."""
    widths = FLOAT32_WIDTHS if dtype == torch.float32 else WIDTHS
    return next((own for own in widths if width <= own), None)


def pad_heads(x: Tensor) -> Tensor:
    """x [tokens, heads, d], which fits -> [tokens, heads, width of the kernels], zeros behind."""
    width = find_kernel_width(x.shape[2], x.dtype)
    assert width is not None
    return x if width == x.shape[2] else torch.nn.functional.pad(x, (0, width - x.shape[2]))


def cut_heads(x: Tensor, width: int) -> Tensor:
    """The inverse of `pad_heads`."""
    return x if width == x.shape[2] else x[..., :width].contiguous()


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
    if any(find_kernel_width(x.shape[2], x.dtype) is None for x in (q, v)):
        raise ValueError(
            f"the kernels are for heads up to {WIDTHS[-1]} wide (float32: {FLOAT32_WIDTHS[-1]}), "
            f"not {q.shape[2]} and {v.shape[2]}; use kernels.attention"
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
    padded = (pad_heads(x) for x in (q, k, v))
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        *padded, position_bias, time_bias, plan, float(alpha), float(scale_length)
    )
    return cut_heads(out, v.shape[2])


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


def _describe_table(table: Tensor | None, queries: int, keys: int) -> Block | None:
    """A descriptor of a table over pairs of tokens, in tiles; None without one."""
    return (
        table if table is None else Block(table, [*table.shape], [*table.stride()], [queries, keys])
    )


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
        budget: int,  # pairs of a table
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
        self.width = width = max(q.shape[2], v.shape[2])
        self.pairs: Tensor | None = None
        self.stored: StoredLaunch | None = None
        self.launches: tuple[AttentionLaunch, tuple[KeyLaunch, ...], AttentionLaunch]
        pairs = plan.pair_blocks * PAIR_QUERIES * PAIR_KEYS
        self.stores = narrow and q.shape[1] * pairs <= budget
        if not narrow:
            self.launches = FLOAT32_FORWARD, FLOAT32_KV, FLOAT32_Q
        elif position is None and time is None:
            self.launches = FORWARD[width], BACKWARD_KV[width], BACKWARD_Q[width]
            self.stored = STORED.get(width) if self.stores else None
        elif pairs <= budget:
            self.launches = BIASED_FORWARD[width], BIASED_KV[width], BIASED_Q[width]
            self.pairs = self._compute_pair_biases()
            self.stored = BIASED_STORED.get(width) if self.stores else None
        else:
            of_keys: tuple[KeyLaunch, ...] = COMPUTED_KV if time is None else TIMED_KV
            if width == WIDTHS[-1]:
                of_keys = COMPUTED_WIDE_KV
            self.launches = COMPUTED_FORWARD, of_keys, COMPUTED_Q

    def _compute_pair_biases(self) -> Tensor:
        """Half the bias of every pair of tokens [blocks * PAIR_QUERIES, PAIR_KEYS] float16: heads
        and kernels read it instead of computing it each for themselves."""
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

        launch = self.launches[0]
        tiles = self.plan.query_tiles(launch.tile)
        launch_kernel(
            forward_kernel, (len(tiles) * self.plan.heads,), build_descriptor(self.q, launch.tile),
            build_descriptor(self.k, launch.inner), build_descriptor(self.v, launch.inner),
            _describe_table(self.pairs, launch.tile, launch.inner), out, tiles,
            half_alpha=self.half_alpha, inverse_scale=1 / scale, M=launch.tile, N=launch.inner,
            **self._build_arguments(launch),
        )  # fmt: skip

    def backward(
        self,
        grad: Tensor,
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        scale: float,
        *,
        need_biases: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Writes the gradients of q, k and v; returns those of both biases in float32, if they are
        needed."""
        changes = self._allocate_stored() if self.stored or need_biases and self.stores else None
        if self.stored is not None and changes is not None:
            weights = self._allocate_stored()
            self.backward_q(self.stored.q, grad, grad_q, scale, weights, changes)
            self.backward_stored(self.stored.kv, weights, grad, grad_v, 1 / scale)
            del weights
            self.backward_stored(self.stored.kv, changes, self.q, grad_k, self.half_alpha / scale)
        else:
            for launch in self.launches[1]:
                self.backward_kv(launch, grad, grad_k, grad_v, scale)
            self.backward_q(self.launches[2], grad, grad_q, scale, None, changes)
        return self.backward_bias(grad, scale, changes) if need_biases else (None, None)

    def _allocate_stored(self) -> Tensor:
        """Room for one number per head and pair of tokens, in square blocks."""
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
            STAGES=launch.stages, MASKED_STAGES=launch.masked_stages, num_warps=launch.warps,
            maxnreg=launch.registers,
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
            **self._build_arguments(launch),
        )  # fmt: skip

    def backward_q(
        self,
        launch: AttentionLaunch,
        grad: Tensor,
        grad_q: Tensor,
        scale: float,
        weights: Tensor | None,
        changes: Tensor | None,
    ) -> None:
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
            N=launch.inner, **self._build_arguments(launch),
        )  # fmt: skip

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

    def backward_bias(
        self, grad: Tensor, scale: float, changes: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of both biases in float32: partial sums in memory, added up in a fixed
        order."""
        from freescale.kernels.attention.triton_bias_kernels import (
            backward_bias_kernel,
            sum_distances_kernel,
        )

        position, time = self.bias["position_bias"], self.bias["time_bias"]
        launch = BIAS_SUMS[self.width] if changes is None else STORED_SUMS
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
            *(
                build_descriptor(x, size) if changes is None else None
                for x in (self.q, self.k, self.v, grad)
            ),
            _describe_table(self.pairs if changes is None else None, size, size),
            _describe_table(changes, size, size),
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
                sum_distances_kernel, (len(counts),), by_distance, by_key, pieces, counts,
                grad_position, position.numel(), B=size, S=32, num_warps=4,
            )  # fmt: skip
            if by_self is not None:
                grad_position[:1] += by_self.sum()
        if by_bucket is not None:
            grad_time = by_bucket.sum(0)[: self.plan.buckets + 1]
        return grad_position, grad_time


def _list_budgets(plan: TilePlan) -> tuple[int, ...]:
    """What a table may hold. While launches are recorded, whatever a batch may find: room for all
    tables, for the biases of pairs alone, and for none."""
    if not is_recording():
        return (PAIR_BUDGET,)
    return PAIR_BUDGET, plan.pair_blocks * PAIR_QUERIES * PAIR_KEYS, 0


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
            for budget in _list_budgets(plan):
                _Call(q, k, v, biases, plan, alpha, budget).forward(out, scale)
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
