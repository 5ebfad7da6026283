"""Whole HSTU layers on NVIDIA GPUs with few launches and few passes over memory: six launches a
layer forward, ten backward without biases.

One autograd function per `models.HSTULayer`, instead of separate operations. The residual stream x
stays in the parameters' dtype. A layer takes x and the previous layer's product, not yet added, and
returns x and its own product: the sum, the bias of the product and the norm are one kernel.
Backward, that kernel writes the sum's gradient twice: in the stream's dtype for the previous layer,
and in the products' dtype for its matrix products. Gradients of vectors are sums over parts of the
tokens, in an order that depends only on their number. Gradients of matrices leave the product in
the parameters' dtype. The same inputs give the same bits.

A wide layer has no SiLU launch: values, queries and keys are columns of the projection, and the
attention's backward writes their gradients into its columns. Its gate writes three times as many
columns, and its product has no bias.

The projection pads heads of other widths than the attention's kernels with columns of zeros: its
matrix gets rows of zeros behind the values, queries and keys of each head. After the attention the
padding is cut off, so the gated norm does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from freescale.kernels.attention.triton import (
    Forward,
    attend,
    cut_heads,
    differentiate_attention,
    make_readable,
    pad_heads,
)
from freescale.kernels.jit.launch import (
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    round_up_to_power_of_two,
    use_device,
)
from freescale.kernels.layer.parameters import LayerOptions, LayerParameters
from freescale.kernels.layer.triton import WIDE, choose_draws, choose_shape

# Backward keeps three sums of a tile in registers: half the tile, twice the programs at a time.
FORWARD, BACKWARD = RowLaunch(2048, 4, 4), RowLaunch(1024, 4, 4)
# Backward: few enough registers for five programs per SM, or four of the gate with several rows
# each. All parts of the tokens, each with its own sums, run at once on the 132 SMs of an H200. For
# the gate that is one part too many per SM, which many tokens avoid: LONG_PARTS of at least
# LONG_ROWS tokens are five waves of the gate and four of the others.
REGISTERS, GATE_REGISTERS, MOST_PARTS = 96, 128, 5 * 132
LONG_PARTS, LONG_ROWS = 4 * MOST_PARTS, 128
SILU_ELEMENTS, SILU_COLUMNS = 2048, 256  # of a program, at most


def run_layers(x: Tensor, layers: Sequence[LayerParameters], options: LayerOptions) -> Tensor:
    """Runs x [tokens, width], at least one token, through all layers. The number of a layer is the
    stream of its dropout."""
    require_gpu(x.device, "models.HSTULayer")
    options.check(x, layers[0])
    product: Tensor | None = None
    bias: Tensor | None = None
    x = x.contiguous()
    with use_device(x.device):
        copies = _pad_projections(_cast_weights(layers, options.dtype), options)
        for number, (layer, copied) in enumerate(zip(layers, copies, strict=True), options.first):
            own = layer[:7] + layer[8:]
            inputs = x, product, bias, *own, copied, options, number
            # dropout is a function of random keys: no generator state to preserve
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
    """Returns (projection, projection_bias, output) of each layer in `dtype`, cast by one launch.

    Repeated for each batch: an optimizer may have changed them.
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
    """Pads projections and their biases with rows of zeros, to `options.columns`."""
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
def _choose_backward_shape(
    width: int, dtype: torch.dtype, registers: int = REGISTERS
) -> dict[str, Any]:
    """Limits the registers: to `registers` for programs with several rows, and not at all for rows
    of eight warps or float32, which need more."""
    shape = choose_shape(BACKWARD, width)
    if width >= WIDE or dtype == torch.float32:
        return {**shape, "maxnreg": None}
    return {**shape, "maxnreg": REGISTERS if shape["R"] == 1 else registers}


@cache
def _choose_silu_shape(widths: tuple[int, ...]) -> dict[str, int]:
    """R tokens and C columns of one of the pieces."""
    columns = min(SILU_COLUMNS, round_up_to_power_of_two(max(widths)))
    return {"R": SILU_ELEMENTS // columns, "C": columns, "num_warps": 4}


class _Sums:
    """Partial sums over the tokens for the gradients of vectors: [parts, columns] float32. The
    tokens of a part are a multiple of `least`."""

    def __init__(self, tokens: int, device: torch.device, least: int, **widths: int) -> None:
        self.widths, ends = widths, np.cumsum([0, *widths.values()]).tolist()
        self.places, end = dict(zip(widths, ends, strict=False)), ends[-1]
        # a multiple of the rows of any kernel's iteration, all powers of two
        rows = max(least, *(choose_shape(BACKWARD, width)["R"] for width in widths.values()))
        most = LONG_PARTS if tokens >= LONG_PARTS * LONG_ROWS else MOST_PARTS
        self.rows = count_blocks(count_blocks(tokens, most), rows) * rows  # of a part
        self.count = count_blocks(tokens, self.rows)
        self.parts = torch.empty(self.count, end, dtype=torch.float32, device=device)

    def place(self, **names: str) -> dict[str, int]:
        """Constants of a kernel that writes sums: their first columns, and the number of all
        columns."""
        places = {constant: self.places[name] for constant, name in names.items()}
        return {"SUMS": self.parts.shape[1], **places}

    def sum_up(self) -> dict[str, Tensor]:
        totals = torch.split(self.parts.sum(0), list(self.widths.values()))
        return dict(zip(self.widths, totals, strict=True))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`, without an intermediate rounding if possible."""
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
        # means and inverse deviations of both norms, each aligned to 16 bytes
        statistics = _empty((4, count_blocks(tokens, 4) * 4), torch.float32, x)
        means, inverses, gate_means, gate_inverses = statistics.unbind()
        shape = choose_shape(FORWARD, width)
        launch_kernel(
            add_norm_kernel, (count_blocks(tokens, shape["R"]),),
            x, added, added_bias, input_weight, input_bias, total_x, normal, means, inverses,
            tokens, options.eps, **shape,
        )  # fmt: skip
        projected = torch.addmm(copied[1], normal, copied[0].t())
        if options.wide:
            active = projected[:, gated_width:]
        else:
            active = _empty((tokens, total - gated_width), dtype, x)
            silu = _choose_silu_shape(columns[1:])
            grid = count_blocks(tokens, silu["R"]), count_blocks(total - gated_width, silu["C"])
            launch_kernel(
                silu_kernel, grid, projected, active, tokens, FIRST=gated_width, TOTAL=total, **silu
            )
        inputs = *_split_heads(active, options), (position_bias, time_bias)
        found = attend(*inputs, *options.attention)
        attended = cut_heads(found.out, options.d_v)
        gated = _empty((tokens, (3 if options.wide else 1) * gated_width), dtype, x)
        shape = choose_shape(FORWARD, gated_width)
        launch_kernel(
            gate_kernel, (count_blocks(tokens, shape["R"]),),
            attended, projected, options.keys, gate_weight, gate_bias, gated,
            gate_means, gate_inverses, tokens, options.eps, **choose_draws(number, options.keep),
            WIDE=options.wide, TOTAL=total, **shape,
        )  # fmt: skip
        product = torch.mm(gated, copied[2].t())
        ctx.save_for_backward(
            total_x, normal, projected, active, attended, gated, statistics,
            input_weight, gate_weight, gate_bias, position_bias, time_bias, *copied[::2],
            found.pairs,
        )  # fmt: skip
        ctx.options, ctx.number = options, number
        ctx.added = None if added is None else added.dtype
        ctx.biased = added_bias is not None
        ctx.dtypes = [weight.dtype for weight in (projection, projection_bias, output)]
        return total_x, product

    @staticmethod
    def backward(ctx, above, grad):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_fused_kernels import (
            add_norm_backward_kernel,
            column_sums_kernel,
            gate_backward_kernel,
            silu_backward_kernel,
        )

        x, normal, projected, active, attended, gated, statistics, *rest = ctx.saved_tensors
        input_weight, gate_weight, gate_bias, *biases, projection, output, pairs = rest
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
                tokens, sums.rows // shape["R"], **choose_draws(ctx.number, options.keep),
                WIDE=options.wide, TOTAL=total, **shape, **sums.place(
                    WEIGHT_AT="gate_weight", BIAS_AT="gate_bias", GATE_AT="projection_bias"
                ),
            )  # fmt: skip
            into = None
            if options.wide:
                v, q, k = _view_heads(grad_projected[:, gated_width:], options)
                into = q, k, v
            grad_q, grad_k, grad_v, *grad_biases = differentiate_attention(
                pad_heads(grad_attended), *_split_heads(active, options), tuple(biases),
                *options.attention, forward=Forward(attended, pairs, None),
                need_biases=any(ctx.needs_input_grad[10:12]), into=into,
            )  # fmt: skip
            if options.wide:
                launch_kernel(
                    column_sums_kernel,
                    (sums.count, count_blocks(total - gated_width, silu["C"])),
                    grad_projected, sums.parts, tokens, sums.rows // silu["R"],
                    **sums.place(AT="projection_bias"), FIRST=gated_width, TOTAL=total, **silu,
                )  # fmt: skip
            else:
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
                sums.parts, tokens, sums.rows // shape["R"], ADDED=ctx.biased,
                **sums.place(WEIGHT_AT="input_weight", BIAS_AT="input_bias", ADDED_AT="added_bias"),
                **shape,
            )  # fmt: skip
            found = sums.sum_up()
            rows = options.locate_rows(x.device)
            if rows is not None:
                grad_projection = grad_projection.index_select(0, rows)
                found["projection_bias"] = found["projection_bias"].index_select(0, rows)
        grad_added = grad_x if grad_added is None else grad_added
        grad_bias = found["added_bias"].to(x.dtype) if ctx.biased else None
        added = (grad_added if ctx.added else None, grad_bias)
        norm = (found[name].to(input_weight.dtype) for name in ("input_weight", "input_bias"))
        return (
            grad_x, *added, *norm, grad_projection, found["projection_bias"].to(ctx.dtypes[1]),
            found["gate_weight"].to(gate_weight.dtype), found["gate_bias"].to(gate_bias.dtype),
            grad_output, *grad_biases, None, None, None,
        )  # fmt: skip


class _AddProduct(torch.autograd.Function):
    """Adds the last layer's product to the stream."""

    @staticmethod
    def forward(ctx, x, added, added_bias):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_fused_kernels import add_norm_kernel

        total, (tokens, width) = torch.empty_like(x), x.shape
        shape = choose_shape(FORWARD, width)
        launch_kernel(
            add_norm_kernel, (count_blocks(tokens, shape["R"]),),
            x, added, added_bias, None, None, total, None, None, None, tokens, 0.0, **shape,
        )  # fmt: skip
        ctx.added, ctx.bias = added.dtype, None if added_bias is None else added_bias.dtype
        return total

    @staticmethod
    def backward(ctx, above):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_fused_kernels import add_norm_backward_kernel

        above, (tokens, width) = above.contiguous(), above.shape
        if ctx.bias is None:
            return above, above.to(ctx.added), None
        with use_device(above.device):
            sums = _Sums(tokens, above.device, 1, added_bias=width)
            grad_added = None if ctx.added == above.dtype else _empty(above.shape, ctx.added, above)
            shape = choose_shape(BACKWARD, width)
            launch_kernel(
                add_norm_backward_kernel, (sums.count,),
                None, above, None, None, None, None, None, grad_added,
                sums.parts, tokens, sums.rows // shape["R"], ADDED=True,
                **sums.place(WEIGHT_AT="added_bias", BIAS_AT="added_bias", ADDED_AT="added_bias"),
                **shape,
            )  # fmt: skip
            grad_bias = sums.sum_up()["added_bias"].to(ctx.bias)
        return above, above if grad_added is None else grad_added, grad_bias


def _view_heads(active: Tensor, options: LayerOptions) -> Iterator[Tensor]:
    """[tokens, columns of v, q, k] -> values, queries and keys [tokens, heads, d]."""
    parts = torch.split(active, list(options.columns[1:]), dim=1)
    return (part.view(len(active), options.heads, -1) for part in parts)


def _split_heads(active: Tensor, options: LayerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens, columns of v, q, k] -> queries, keys and values [tokens, heads, d]. Those of a wide
    layer are copied if its gate has an odd width."""
    v, q, k = map(make_readable, _view_heads(active, options))
    return q, k, v
