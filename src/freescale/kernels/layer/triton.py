"""The operations around the attention of an HSTU layer as Triton kernels, for NVIDIA GPUs.

The same functions as `layer.reference`. Each reads its inputs and writes its outputs once. The
dropout mask is never in memory: forward and backward hash the tokens' keys to the bits of
`random.draw_keep_mask`. SiLU itself is torch's, which moves no more memory than needed. Its
gradient is computed from those of the four parts, without concatenating them. Gradients of weights
are sums over parts of the tokens, in an order that depends only on their number: the same inputs
give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.attention.checks import check_same_device
from freescale.kernels.jit.launch import (
    KernelModule,
    RowLaunch,
    count_blocks,
    launch_kernel,
    require_gpu,
    use_device,
)
from freescale.random import compute_keep_threshold

MAX_WIDTH = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_PARTS = 1024  # parts of the tokens, each with its own sums: several per SM
SILU_ROWS, SILU_COLUMNS = 8, 256  # of a program
# 16 elements per thread and tensor: two loads of 16 bytes in bfloat16. Backward keeps two sums of a
# tile in registers. At least four columns: a hash of the dropout yields four draws.
FORWARD, BACKWARD = RowLaunch(2048, 4, 4), RowLaunch(2048, 4, 4)
WIDE = 2048  # rows at least this wide get more warps
_kernels = KernelModule("freescale.kernels.layer.triton_kernels")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As the reference."""
    _check(dtype, weight, bias, x=x)
    require_gpu(x.device, "kernels.layer.reference")
    out: Tensor = _LayerNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, float(eps), dtype, False
    )
    return out


def swish_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As the reference."""
    _check(dtype, weight, bias, x=x)
    require_gpu(x.device, "kernels.layer.reference")
    out: Tensor = _LayerNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, float(eps), dtype, True
    )
    return out


def silu_split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """As the reference, for four sizes."""
    if x.ndim != 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"x must be [tokens, width] of {' or '.join(map(str, DTYPES))}, not "
            f"{x.dtype} {list(x.shape)}"
        )
    if len(sizes) != 4 or min(sizes) < 1 or sum(sizes) != x.shape[1]:
        raise ValueError(
            f"sizes must be four widths that add up to {x.shape[1]}, not {list(sizes)}"
        )
    require_gpu(x.device, "kernels.layer.reference")
    parts: tuple[Tensor, ...] = _SiluSplit.apply(  # type: ignore[no-untyped-call]
        x, tuple(sizes)
    )
    return parts


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, *,
    keys: Tensor | None = None, stream: int = 0, keep: float = 1.0,
) -> Tensor:  # fmt: skip
    """As the reference."""
    _check(dtype, weight, bias, x=x, gate=gate)
    if keys is not None:
        if keys.dtype != torch.int64 or keys.shape != x.shape[:1]:
            raise ValueError(
                f"keys must be int64 [{x.shape[0]}], one per token, not {keys.dtype} "
                f"{list(keys.shape)}"
            )
        if not 0 < keep <= 1 or not 0 <= stream < 2**31:
            raise ValueError(
                f"keep must be in (0, 1] and stream 0 or more, not {keep} and {stream}"
            )
        check_same_device(x=x, keys=keys)
    require_gpu(x.device, "kernels.layer.reference")
    out: Tensor = _GatedNorm.apply(  # type: ignore[no-untyped-call]
        x, gate, weight, bias, float(eps), dtype, keys, stream, float(keep)
    )
    return out


def drop(x: Tensor, keys: Tensor | None, stream: int, keep: float, *, relu: bool = False) -> Tensor:
    """As the reference."""
    out: Tensor = _Drop.apply(x, keys, stream, keep, relu)  # type: ignore[no-untyped-call]
    return out


def _check(dtype: torch.dtype, weight: Tensor, bias: Tensor, **rows: Tensor) -> None:
    """Checks rows [tokens, width], weight and bias [width], on one device, before any launch."""
    x = rows["x"]
    for name, tensor in rows.items():
        if tensor.ndim != 2 or tensor.shape != x.shape or tensor.dtype not in DTYPES:
            what = "[tokens, width]" if name == "x" else list(x.shape)
            raise ValueError(
                f"{name} must be {what} of {DTYPES}, not {tensor.dtype} {list(tensor.shape)}"
            )
    if not 1 <= x.shape[1] <= MAX_WIDTH:
        raise ValueError(
            f"the kernels are for rows 1 to {MAX_WIDTH} wide, not {x.shape[1]}; use "
            "kernels.layer.reference"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor.shape != x.shape[1:] or tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be [{x.shape[1]}] of {DTYPES}, not {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    if dtype not in DTYPES:
        raise ValueError(f"the result can be {DTYPES}, not {dtype}")
    check_same_device(weight=weight, bias=bias, **rows)


@cache
def choose_shape(launch: RowLaunch, width: int) -> dict[str, int]:
    shape = launch.shape(width)
    return shape | {"num_warps": 2 * shape["num_warps"]} if width >= WIDE else shape


def choose_draws(stream: int, keep: float) -> dict[str, float]:
    """Arguments of a kernel with dropout. Triton reserves the name `stream`."""
    return {"layer": stream, "threshold": compute_keep_threshold(keep), "share": 1 / keep}


def _allocate_statistics(x: Tensor) -> list[Tensor]:
    """Mean and inverse deviation of each row."""
    return [torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(2)]


class _Parts:
    """The parts of the tokens that programs share in backward, and their sums for weight and
    bias."""

    def __init__(self, x: Tensor) -> None:
        self.shape = choose_shape(BACKWARD, x.shape[1])
        tiles = count_blocks(x.shape[0], self.shape["R"])
        self.steps = count_blocks(tiles, min(tiles, MOST_PARTS))
        self.count = count_blocks(tiles, self.steps)
        self.sums = torch.empty(2, self.count, x.shape[1], dtype=torch.float32, device=x.device)

    def sum_up(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of weight and bias."""
        both = self.sums.sum(1)
        return both[0].to(weight.dtype), both[1].to(bias.dtype)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, dtype, swish):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_kernels import layer_norm_kernel

        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        mean, inverse = _allocate_statistics(x)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.swish = swish
        if out.numel():
            shape = choose_shape(FORWARD, x.shape[1])
            with use_device(x.device):
                launch_kernel(
                    layer_norm_kernel, (count_blocks(x.shape[0], shape["R"]),), x, weight, bias,
                    out, mean, inverse, x.shape[0], eps, SWISH=swish, **shape,
                )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_kernels import layer_norm_backward_kernel

        x, weight, bias, mean, inverse = ctx.saved_tensors
        if not x.numel():
            return *map(torch.zeros_like, (x, weight, bias)), None, None, None
        grad_x, parts = torch.empty_like(x), _Parts(x)
        with use_device(x.device):
            launch_kernel(
                layer_norm_backward_kernel, (parts.count,), grad.contiguous(), x, weight, bias,
                mean, inverse, grad_x, *parts.sums, x.shape[0], parts.steps, SWISH=ctx.swish,
                **parts.shape,
            )  # fmt: skip
        return grad_x, *parts.sum_up(weight, bias), None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, bias, eps, dtype, keys, stream, keep):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_kernels import gated_norm_kernel

        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        gate = gate if gate.stride(1) == 1 else gate.contiguous()
        keys = None if keys is None else keys.contiguous()
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        mean, inverse = _allocate_statistics(x)
        ctx.save_for_backward(x, gate, keys, weight, bias, mean, inverse)
        ctx.drawn = choose_draws(stream, keep)
        if out.numel():
            shape = choose_shape(FORWARD, x.shape[1])
            with use_device(x.device):
                launch_kernel(
                    gated_norm_kernel, (count_blocks(x.shape[0], shape["R"]),), x, gate, keys,
                    weight, bias, out, mean, inverse, x.shape[0], gate.stride(0), eps, **ctx.drawn,
                    **shape,
                )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_kernels import gated_norm_backward_kernel

        x, gate, keys, weight, bias, mean, inverse = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if not x.numel():
            none = (None,) * 5
            return grad_x, grad_gate, torch.zeros_like(weight), torch.zeros_like(bias), *none
        parts = _Parts(x)
        with use_device(x.device):
            launch_kernel(
                gated_norm_backward_kernel, (parts.count,), grad.contiguous(), x, gate, keys,
                weight, bias, mean, inverse, grad_x, grad_gate, *parts.sums, x.shape[0],
                parts.steps, gate.stride(0), **ctx.drawn, **parts.shape,
            )  # fmt: skip
        return grad_x, grad_gate, *parts.sum_up(weight, bias), None, None, None, None, None


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keys, stream, keep, relu):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        ctx.save_for_backward(x if relu else None, keys)
        ctx.drawn = choose_draws(stream, keep)
        return _launch_drop(x, x if relu else None, keys, ctx.drawn)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        sign, keys = ctx.saved_tensors
        return _launch_drop(grad.contiguous(), sign, keys, ctx.drawn), None, None, None, None


def _launch_drop(
    x: Tensor, sign: Tensor | None, keys: Tensor | None, drawn: dict[str, float]
) -> Tensor:
    out, shape = torch.empty_like(x), choose_shape(FORWARD, x.shape[1])
    if out.numel():
        with use_device(x.device):
            launch_kernel(
                _kernels.drop_kernel, (count_blocks(x.shape[0], shape["R"]),), x, sign, keys, out,
                x.shape[0], **drawn, **shape,
            )  # fmt: skip
    return out


class _SiluSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.sizes = sizes
        return torch.split(F.silu(x), list(sizes), dim=1)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        from freescale.kernels.layer.triton_kernels import silu_backward_kernel

        x = ctx.saved_tensors[0].contiguous()
        out = torch.empty_like(x)
        if out.numel():
            columns = sum(count_blocks(size, SILU_COLUMNS) for size in ctx.sizes)
            with use_device(x.device):
                launch_kernel(
                    silu_backward_kernel, (count_blocks(x.shape[0], SILU_ROWS), columns),
                    *(grad.contiguous() for grad in grads), x, out, x.shape[0], *ctx.sizes,
                    R=SILU_ROWS, C=SILU_COLUMNS, num_warps=4,
                )  # fmt: skip
        return out, None
