"""The small networks around the encoder, and times as their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from freescale.kernels.dispatch.layer import norm_rows, swish_norm

EPS = 1e-5  # of all norms outside of the encoder's layers
HOUR, DAY = (3600, 24), (86400, 7)  # seconds of a unit, units of a cycle
CYCLES = (HOUR, DAY)

Draw = Callable[[Tensor], Tensor]


class RowNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return norm_rows(x, self.weight, self.bias, self.eps)


class SwishNorm(nn.LayerNorm):
    """x * sigmoid(LayerNorm(x)), in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return swish_norm(x, self.weight, self.bias, self.eps)


def make_linear(inputs: int, outputs: int, draw: Draw) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    draw(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def make_network(sizes: tuple[int, int, int], draw: Draw, *, norm: bool = True) -> nn.Sequential:
    """Builds Linear, SwishNorm, Linear of (inputs, hidden, outputs), and a norm of the outputs."""
    inputs, hidden, outputs = sizes
    last = [RowNorm(outputs, eps=EPS)] if norm else []
    return nn.Sequential(
        make_linear(inputs, hidden, draw),
        SwishNorm(hidden, eps=EPS),
        make_linear(hidden, outputs, draw),
        *last,
    )


class Permute(torch.autograd.Function):
    """Rows x [n, ...] in the places `order` [n], a permutation: moved by reads in both directions,
    which are faster than writes to places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None


def find_time_buckets(elapsed: Tensor, last: int) -> Tensor:
    """Seconds [...] before the request -> bucket [...] int64: the root of the minutes, at most
    `last`."""
    minutes = elapsed.clamp(min=0).to(torch.float32) / 60
    return minutes.sqrt().long().clamp(max=last)


def find_phases(times: Tensor) -> Tensor:
    """Times [n] in seconds since 1970 -> cosine and sine of the hour of the day and of the day of
    the week [n, 4] float32, the cycle of weeks from a Thursday. The public model rounds times to
    float32 and pi to 3.14: phases are the same."""
    seconds = times.to(torch.float32)
    phases = []
    for unit, count in CYCLES:
        units = torch.div(seconds, unit, rounding_mode="floor")
        angle = torch.remainder(units, count) / count * 2 * 3.14
        phases += [angle.cos(), angle.sin()]
    return torch.stack(phases, dim=-1)
