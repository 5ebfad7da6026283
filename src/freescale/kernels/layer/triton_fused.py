"""Whole HSTU layers on NVIDIA GPUs with few launches and few passes over memory: six launches a
layer forward, ten backward without biases.

What `models.HSTULayer` computes from separate operations, as one autograd function a layer. The
residual stream x stays in the parameters' dtype. A layer takes it with the product of the layer
before, not yet added, and leaves it with its own: the sum, the bias of that product and the norm
are one kernel. Backward, the sum's gradient leaves one kernel twice: in the stream's dtype for the
layer before, and in the products' dtype for its matrix products. Gradients of all vectors are sums
of parts of the tokens, in an order that depends on their number alone; those of matrices leave the
product in the parameters' dtype. The same inputs give the same bits.

Heads whose width the attention's kernels do not have get columns of zeros from the projection: rows
of zeros stand between those of its matrix where the values, queries and keys of a head end. Behind
the attention they are cut off, so that the gated norm sees none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from freescale.kernels.attention.checks import check_plan
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton import (
    attend,
    cut_heads,
    differentiate_attention,
    find_kernel_width,
    pad_heads,
)
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.jit.launch import (
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    round_up_to_power_of_two,
    use_device,
)
from freescale.kernels.layer.triton import WIDE
from freescale.kernels.upload import upload
from freescale.random import compute_keep_threshold

# Backward keeps three sums of a tile in registers: half the tile, twice the programs at a time.
FORWARD, BACKWARD = RowLaunch(2048, 4, 4), RowLaunch(1024, 4, 4)
# Backward: so few registers that five programs run on a multiprocessor at a time, four of the gate
# with several rows each; and no more parts of the tokens, each with sums of its own, than run so on
# the 132 of an H200: none waits for others to end.
REGISTERS, GATE_REGISTERS, MOST_PARTS = 96, 128, 5 * 132
SILU_ELEMENTS, SILU_COLUMNS = 2048, 256  # of a program, at most


class LayerParameters(NamedTuple):
    """Of one layer, in the order in which its function takes them."""

    input_weight: Tensor  # [width]
    input_bias: Tensor
    projection: Tensor  # [2 heads (d_qk + d_v), width]
    projection_bias: Tensor
    gate_weight: Tensor  # [heads d_v]
    gate_bias: Tensor
    output: Tensor  # [width, heads d_v]
    output_bias: Tensor  # [width]: added with the product, by the layer that follows
    position_bias: Tensor | None
    time_bias: Tensor | None


@dataclass(frozen=True)
class LayerOptions:
    """What the layers of a model share in a step."""

    plan: TilePlan | AttentionPlan
    heads: int
    d_qk: int
    d_v: int
    scale_length: int
    eps: float
    dtype: torch.dtype  # of the products
    keys: Tensor | None  # [tokens] int64; None: nothing is dropped
    keep: float  # the share that is kept
    recompute: bool  # a layer's activations in backward, instead of keeping them

    @property
    def kernel_widths(self) -> tuple[int, int]:
        """Of queries and of values in the attention's kernels: at least d_qk and d_v."""
        found = [find_kernel_width(width, self.dtype) for width in (self.d_qk, self.d_v)]
        assert found[0] is not None and found[1] is not None
        return found[0], found[1]

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Of the projection: gate, values, queries, keys; zeros behind each head's are counted."""
        of_queries, of_values = self.kernel_widths
        return self.heads * self.d_v, self.heads * of_values, *(2 * (self.heads * of_queries,))

    def locate_rows(self, device: torch.device) -> Tensor | None:
        """[rows of the projection] int64: where they stand among `columns`; None: as they are."""
        widths = self.d_qk, self.d_v
        if self.kernel_widths == widths:
            return None
        return _locate_rows(self.heads, widths, self.kernel_widths, device)

    @property
    def attention(self) -> tuple[TilePlan, float, float]:
        assert isinstance(self.plan, TilePlan)
        return self.plan, self.d_qk**-0.5, float(self.scale_length)


@cache
def _locate_rows(
    heads: int, widths: tuple[int, int], padded: tuple[int, int], device: torch.device
) -> Tensor:
    (d_qk, d_v), (of_queries, of_values) = widths, padded
    pieces = [np.arange(heads * d_v)]
    start = heads * d_v
    for width, wide in ((d_v, of_values), (d_qk, of_queries), (d_qk, of_queries)):
        pieces.append((start + wide * np.arange(heads)[:, None] + np.arange(width)).ravel())
        start += heads * wide
    return upload(np.concatenate(pieces), device)


def run_layers(x: Tensor, layers: Sequence[LayerParameters], options: LayerOptions) -> Tensor:
    """x [tokens, width], at least one token, through all layers. The number of a layer is the
    stream of its dropout."""
    require_gpu(x.device, "models.HSTULayer")
    first = layers[0]
    check_plan(
        options.plan,
        x[:, None].expand(-1, options.heads, -1),
        options.plan.lengths,
        options.plan.candidate_counts,
        first.position_bias,
        first.time_bias,
    )
    product: Tensor | None = None
    bias: Tensor | None = None
    x = x.contiguous()
    with use_device(x.device):
        copies = _pad_projections(_cast_weights(layers, options.dtype), options)
        for number, (layer, copied) in enumerate(zip(layers, copies, strict=True)):
            own = layer[:7] + layer[8:]
            inputs = x, product, bias, *own, copied, options, number
            # dropout is a function of keys: there is no generator state to keep
            x, product = (
                checkpoint(_Layer.apply, *inputs, use_reentrant=False, preserve_rng_state=False)
                if options.recompute
                else _Layer.apply(*inputs)  # type: ignore[no-untyped-call]
            )
            bias = layer.output_bias
        out: Tensor = _AddProduct.apply(x, product, bias)  # type: ignore[no-untyped-call]
    return out


def _cast_weights(
    layers: Sequence[LayerParameters], dtype: torch.dtype
) -> list[tuple[Tensor, ...]]:
    """(projection, projection_bias, output) of each layer in `dtype`, by one launch for all.

    Anew for each batch: an optimizer may have changed them since the last one.
    """
    sources = [w.detach() for p in layers for w in (p.projection, p.projection_bias, p.output)]
    if any(source.dtype != dtype for source in sources):
        copies = [torch.empty(w.shape, dtype=dtype, device=w.device) for w in sources]
        torch._foreach_copy_(copies, sources)
        sources = copies
    return [tuple(sources[start : start + 3]) for start in range(0, len(sources), 3)]


def _pad_projections(
    copies: list[tuple[Tensor, ...]], options: LayerOptions
) -> list[tuple[Tensor, ...]]:
    """Projections and their biases with rows of zeros where `options.columns` have them."""
    rows = options.locate_rows(copies[0][0].device)
    if rows is None:
        return copies
    projections, biases, outputs = zip(*copies, strict=True)
    total = sum(options.columns)
    padded = []
    for same in (torch.stack(projections), torch.stack(biases)):  # [layers, rows, ...]
        whole = same.new_zeros(same.shape[0], total, *same.shape[2:])
        padded.append(whole.index_copy_(1, rows, same).unbind())
    return list(zip(*padded, outputs, strict=True))


@cache
def _choose_shape(launch: RowLaunch, width: int) -> dict[str, int]:
    shape = launch.shape(width)
    return shape | {"num_warps": 2 * shape["num_warps"]} if width >= WIDE else shape


@cache
def _choose_backward_shape(
    width: int, dtype: torch.dtype, registers: int = REGISTERS
) -> dict[str, Any]:
    """`registers`: of programs with several rows at a time. Rows of eight warps and of float32 do
    not fit in so few."""
    shape = _choose_shape(BACKWARD, width)
    if width >= WIDE or dtype == torch.float32:
        return {**shape, "maxnreg": None}
    return {**shape, "maxnreg": REGISTERS if shape["R"] == 1 else registers}


@cache
def _choose_silu_shape(widths: tuple[int, ...]) -> dict[str, int]:
    """R tokens, C columns of one of the pieces."""
    columns = min(SILU_COLUMNS, round_up_to_power_of_two(max(widths)))
    return {"R": SILU_ELEMENTS // columns, "C": columns, "num_warps": 4}


class _Sums:
    """Partial sums over the tokens, for the gradients of vectors: [parts, columns] float32. A part
    has a multiple of `least` tokens."""

    def __init__(self, tokens: int, device: torch.device, least: int, **widths: int) -> None:
        self.widths = widths
        self.tokens = tokens
        self.places: dict[str, int] = {}
        end = 0
        for name, width in widths.items():
            self.places[name], end = end, end + width
        # a multiple of what any kernel takes at a time, all of them powers of two
        rows = max(least, *(_choose_shape(BACKWARD, width)["R"] for width in widths.values()))
        self.rows = count_blocks(count_blocks(tokens, MOST_PARTS), rows) * rows  # of a part
        self.count = count_blocks(tokens, self.rows)
        self.parts = torch.empty(self.count, end, dtype=torch.float32, device=device)

    def place(self, **names: str) -> dict[str, int]:
        """Constants of a kernel that writes sums: the columns of those named, and of all."""
        places = {constant: self.places[name] for constant, name in names.items()}
        return {"SUMS": self.parts.shape[1], **places}

    def sum_up(self) -> dict[str, Tensor]:
        return dict(
            zip(
                self.widths, torch.split(self.parts.sum(0), list(self.widths.values())), strict=True
            )
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed and returned in `dtype` where the product can."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if dtype == torch.float32 and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, added, added_bias, input_weight, input_bias, projection, projection_bias,
        gate_weight, gate_bias, output, position_bias, time_bias, copied, options, number,
    ):  # fmt: skip
        from freescale.kernels.layer.triton_fused_kernels import (
            add_norm_kernel,
            gate_kernel,
            silu_kernel,
        )

        (tokens, width), dtype, columns = x.shape, options.dtype, options.columns
        gated_width, total = columns[0], sum(columns)
        total_x = x if added is None else torch.empty_like(x)
        normal = _empty((tokens, width), dtype, x)
        # means and inverse deviations of both norms, each from a multiple of 16 bytes on
        statistics = _empty((4, count_blocks(tokens, 4) * 4), torch.float32, x)
        means, inverses, gate_means, gate_inverses = statistics.unbind()
        shape = _choose_shape(FORWARD, width)
        launch_kernel(
            add_norm_kernel, (count_blocks(tokens, shape["R"]),),
            x, added, added_bias, input_weight, input_bias, total_x, normal, means, inverses,
            tokens, options.eps, **shape,
        )  # fmt: skip
        projected = torch.addmm(copied[1], normal, copied[0].t())
        active = _empty((tokens, total - gated_width), dtype, x)
        silu = _choose_silu_shape(columns[1:])
        launch_kernel(
            silu_kernel,
            (count_blocks(tokens, silu["R"]), count_blocks(total - gated_width, silu["C"])),
            projected, active, tokens, FIRST=gated_width, TOTAL=total, **silu,
        )  # fmt: skip
        biases = position_bias, time_bias
        attended = cut_heads(
            attend(*_split_heads(active, options), biases, *options.attention), options.d_v
        )
        gated = _empty((tokens, gated_width), dtype, x)
        shape = _choose_shape(FORWARD, gated_width)
        launch_kernel(
            gate_kernel, (count_blocks(tokens, shape["R"]),),
            attended, projected, options.keys, gate_weight, gate_bias, gated,
            gate_means, gate_inverses, tokens, options.eps, **_choose_draws(options, number),
            TOTAL=total, **shape,
        )  # fmt: skip
        product = torch.mm(gated, copied[2].t())
        ctx.save_for_backward(
            total_x, normal, projected, active, attended, gated, statistics,
            input_weight, gate_weight, gate_bias, position_bias, time_bias, *copied[::2],
        )  # fmt: skip
        ctx.options, ctx.number = options, number
        ctx.added = None if added is None else added.dtype
        ctx.dtypes = [weight.dtype for weight in (projection, projection_bias, output)]
        return total_x, product

    @staticmethod
    def backward(ctx, above, grad):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_fused_kernels import (
            add_norm_backward_kernel,
            gate_backward_kernel,
            silu_backward_kernel,
        )

        x, normal, projected, active, attended, gated, statistics, *rest = ctx.saved_tensors
        input_weight, gate_weight, gate_bias, *biases, projection, output = rest
        means, inverses, gate_means, gate_inverses = statistics.unbind()
        options, (tokens, width) = ctx.options, x.shape
        columns = options.columns
        gated_width, total = columns[0], sum(columns)
        above, grad = above.contiguous(), grad.contiguous()
        with use_device(x.device):
            silu = _choose_silu_shape(columns[1:])
            sums = _Sums(
                tokens, x.device, silu["R"],
                input_weight=width, input_bias=width, added_bias=width,
                projection_bias=total, gate_weight=gated_width, gate_bias=gated_width,
            )  # fmt: skip
            grad_output = _multiply(grad.t(), gated, ctx.dtypes[2])
            grad_gated = torch.mm(grad, output)
            grad_attended, grad_projected = torch.empty_like(attended), torch.empty_like(projected)
            shape = _choose_backward_shape(gated_width, options.dtype, GATE_REGISTERS)
            launch_kernel(
                gate_backward_kernel, (sums.count,),
                grad_gated, attended, projected, options.keys, gate_weight, gate_bias,
                gate_means, gate_inverses, grad_attended, grad_projected, sums.parts,
                tokens, sums.rows // shape["R"], **_choose_draws(options, ctx.number),
                **sums.place(
                    WEIGHT_AT="gate_weight", BIAS_AT="gate_bias", GATE_AT="projection_bias"
                ),
                TOTAL=total, **shape,
            )  # fmt: skip
            grad_q, grad_k, grad_v, *grad_biases = differentiate_attention(
                pad_heads(grad_attended), *_split_heads(active, options), tuple(biases),
                *options.attention,
                need_biases=any(ctx.needs_input_grad[10:12]),
            )  # fmt: skip
            blocks = sum(count_blocks(size, silu["C"]) for size in columns[1:])
            launch_kernel(
                silu_backward_kernel, (sums.count, blocks),
                grad_v, grad_q, grad_k, projected, grad_projected, sums.parts,
                tokens, sums.rows // silu["R"], **sums.place(AT="projection_bias"),
                FIRST=gated_width, FIRST_WIDTH=columns[1], SECOND_WIDTH=columns[2],
                THIRD_WIDTH=columns[3], **silu,
            )  # fmt: skip
            grad_projection = _multiply(grad_projected.t(), normal, ctx.dtypes[0])
            grad_normal = torch.mm(grad_projected, projection)
            grad_x = torch.empty_like(x)
            grad_added = _empty(x.shape, ctx.added, x) if ctx.added not in (None, x.dtype) else None
            shape = _choose_backward_shape(width, options.dtype)
            launch_kernel(
                add_norm_backward_kernel, (sums.count,),
                grad_normal, above, x, input_weight, means, inverses, grad_x, grad_added,
                sums.parts, tokens, sums.rows // shape["R"], ADDED=ctx.added is not None,
                **sums.place(WEIGHT_AT="input_weight", BIAS_AT="input_bias", ADDED_AT="added_bias"),
                **shape,
            )  # fmt: skip
            found = sums.sum_up()
            rows = options.locate_rows(x.device)
            if rows is not None:
                grad_projection = grad_projection.index_select(0, rows)
                found["projection_bias"] = found["projection_bias"].index_select(0, rows)
        return (
            grad_x,
            (grad_x if grad_added is None else grad_added) if ctx.added else None,
            found["added_bias"].to(x.dtype) if ctx.added else None,
            found["input_weight"].to(input_weight.dtype),
            found["input_bias"].to(input_weight.dtype),
            grad_projection,
            found["projection_bias"].to(ctx.dtypes[1]),
            found["gate_weight"].to(gate_weight.dtype),
            found["gate_bias"].to(gate_bias.dtype),
            grad_output,
            *grad_biases,
            None,
            None,
            None,
        )


class _AddProduct(torch.autograd.Function):
    """The last layer's product, added to the stream."""

    @staticmethod
    def forward(ctx, x, added, added_bias):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_fused_kernels import add_norm_kernel

        total, (tokens, width) = torch.empty_like(x), x.shape
        shape = _choose_shape(FORWARD, width)
        launch_kernel(
            add_norm_kernel, (count_blocks(tokens, shape["R"]),),
            x, added, added_bias, None, None, total, None, None, None, tokens, 0.0, **shape,
        )  # fmt: skip
        ctx.added, ctx.bias = added.dtype, added_bias.dtype
        return total

    @staticmethod
    def backward(ctx, above):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_fused_kernels import add_norm_backward_kernel

        above, (tokens, width) = above.contiguous(), above.shape
        with use_device(above.device):
            sums = _Sums(tokens, above.device, 1, added_bias=width)
            grad_added = None if ctx.added == above.dtype else _empty(above.shape, ctx.added, above)
            shape = _choose_shape(BACKWARD, width)
            launch_kernel(
                add_norm_backward_kernel, (sums.count,),
                None, above, None, None, None, None, None, grad_added,
                sums.parts, tokens, sums.rows // shape["R"], ADDED=True,
                **sums.place(WEIGHT_AT="added_bias", BIAS_AT="added_bias", ADDED_AT="added_bias"),
                **shape,
            )  # fmt: skip
            grad_bias = sums.sum_up()["added_bias"].to(ctx.bias)
        return above, above if grad_added is None else grad_added, grad_bias


def _split_heads(active: Tensor, options: LayerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, heads, d] in [tokens, columns of v, q, k]."""
    v, q, k = torch.split(active, list(options.columns[1:]), dim=1)
    q, k, v = (part.view(len(active), options.heads, -1) for part in (q, k, v))
    return q, k, v


def _choose_draws(options: LayerOptions, number: int) -> dict[str, Any]:
    return {
        "layer": number,
        "threshold": compute_keep_threshold(options.keep),
        "share": 1 / options.keep,
    }
