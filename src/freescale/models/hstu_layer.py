"""One layer of HSTU: norm, projection, attention, gate, output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.kernels.attention.plan import AttentionPlan, find_buckets
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.attention import hstu_attention
from freescale.kernels.dispatch.layer import gated_norm, layer_norm, silu_split
from freescale.kernels.layer.parameters import LayerParameters
from freescale.kernels.layer.reference import wide_gate
from freescale.visible import Visible

EPS = 1e-6  # of both norms
# Initial std of the projection. Small gates and values let the residual stream dominate at first,
# and the model learns faster.
PROJECTION_STD = 0.02


def get_product_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a matrix product with this parameter. Autocast does not change float64."""
    kind = parameter.device.type
    cast = torch.is_autocast_enabled(kind) and parameter.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else parameter.dtype


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """linear(x) for x [tokens, in], with a fast path for inference on CPUs.

    On ARM, torch passes products with a transposed matrix to oneDNN, whose setup takes half a
    millisecond per call, longer than the product itself in a small request. Without gradients the
    transposed matrix is therefore made contiguous first.
    """
    served = (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
    # with fewer tokens the copy would cost more than the product
    if not served or x.shape[0] < linear.out_features:
        out: Tensor = linear(x)
        return out
    matrix = linear.weight.t().contiguous()
    return x @ matrix if linear.bias is None else torch.addmm(linear.bias, x, matrix)


class InputNorm(nn.LayerNorm):
    """LayerNorm in the dtype of the following projection."""

    def forward(self, x: Tensor, plan: AttentionPlan | TilePlan) -> Tensor:  # type: ignore[override]
        return layer_norm(plan, x, self.weight, self.bias, self.eps, get_product_dtype(self.weight))


class GatedNorm(nn.LayerNorm):
    """LayerNorm, gate and dropout (if keys are given), in the dtype of the following projection."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        gate: Tensor,
        plan: AttentionPlan | TilePlan,
        keys: Tensor | None,
        stream: int,
        keep: float,
    ) -> Tensor:
        parameters = self.weight, self.bias, self.eps, get_product_dtype(self.weight)
        return gated_norm(plan, x, gate, *parameters, keys=keys, stream=stream, keep=keep)


class WideGate(GatedNorm):
    """As `GatedNorm`, for a wide layer: three times as many columns. In plain torch: on GPUs wide
    layers are fused, unless something other than events attends."""

    def forward(  # type: ignore[override]
        self, x: Tensor, gate: Tensor, plan: AttentionPlan | TilePlan, *drawn: Any
    ) -> Tensor:
        keys, stream, keep = drawn
        parameters = self.weight, self.bias, self.eps, get_product_dtype(self.weight)
        return wide_gate(x, gate, *parameters, keys=keys, stream=stream, keep=keep)


class Before(Protocol):
    """Attention to tokens before the histories, whose `rows` stand after those of the events."""

    rows: int

    def attend(
        self, layer: HSTULayer, of_events: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor: ...


class HSTULayer(nn.Module):
    """LayerNorm, projection to u, v, q, k, attention, gate, dropout, output projection; adds x.

    A `wide` layer is that of DLRM models: SiLU applies to u alone, and the output projection, which
    has no bias, reads u and the attention as well as their product.
    """

    def __init__(
        self,
        *,
        number: int,
        width: int,
        heads: int,
        d_qk: int,
        d_v: int,
        max_length: int,
        dropout: float,
        position_bias: bool,
        time_bias: bool,
        num_time_buckets: int,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.number = number
        self.wide = wide
        self.heads = heads
        self.d_qk = d_qk
        self.d_v = d_v
        self.max_length = max_length
        self.dropout = dropout
        self.input_norm = InputNorm(width, eps=EPS)
        self.projection = nn.Linear(width, 2 * heads * (d_qk + d_v))
        self.attention_norm = (WideGate if wide else GatedNorm)(heads * d_v, eps=EPS)
        self.output = nn.Linear((3 if wide else 1) * heads * d_v, width, bias=not wide)
        self.position_bias = nn.Parameter(torch.empty(max_length + 1)) if position_bias else None
        self.time_bias = nn.Parameter(torch.empty(num_time_buckets + 1)) if time_bias else None
        nn.init.normal_(self.projection.weight, std=PROJECTION_STD)
        nn.init.zeros_(self.projection.bias)
        nn.init.xavier_uniform_(self.output.weight)
        if self.output.bias is not None:
            nn.init.zeros_(self.output.bias)
        for bias in (self.position_bias, self.time_bias):
            if bias is not None:
                nn.init.normal_(bias, std=0.02)

    def collect_parameters(self) -> LayerParameters:
        """The parameters as the fused kernels expect them."""
        return LayerParameters(
            self.input_norm.weight,
            self.input_norm.bias,
            self.projection.weight,
            self.projection.bias,
            self.attention_norm.weight,
            self.attention_norm.bias,
            self.output.weight,
            self.output.bias,
            self.position_bias,
            self.time_bias,
        )

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,
        token_keys: Tensor | None,  # [tokens] int64
        timestamps: Tensor | None,
        candidate_counts: Tensor | None,
        plan: AttentionPlan | TilePlan,
        prefix: Before | None = None,
        attend: Callable[..., Tensor] | None = None,  # takes the place of `hstu_attention`
    ) -> Tensor:
        sizes = [self.heads * self.d_v] * 2 + [self.heads * self.d_qk] * 2
        projected = project(self.projection, self.input_norm(x, plan))
        if self.wide:
            u, v, q, k = torch.split(projected, sizes, dim=1)
            u = F.silu(u)
        else:
            u, v, q, k = silu_split(plan, projected, sizes)
        q, k = (part.view(x.shape[0], self.heads, self.d_qk) for part in (q, k))
        v = v.view(x.shape[0], self.heads, self.d_v)
        whole = q, k, v
        if prefix is not None:
            q, k, v = (part[: x.shape[0] - prefix.rows] for part in whole)
        attended = (attend or hstu_attention)(
            q,
            k,
            v,
            lengths,
            scale_length=self.max_length,
            alpha=self.d_qk**-0.5,
            candidate_counts=candidate_counts,
            position_bias=self.position_bias,
            time_bias=self.time_bias,
            timestamps=timestamps,
            plan=plan,
        )
        if prefix is not None:
            attended = prefix.attend(self, attended, *whole)
        gated = self.attention_norm(
            attended.flatten(1), u, plan, token_keys, self.number, 1 - self.dropout
        )
        return x + project(self.output, gated)  # gated is [tokens, heads * d_v], or three times

    def compute_last(
        self, x: Tensor, lengths: Tensor, timestamps: Tensor | None, visible: Visible | None = None
    ) -> Tensor:
        """[samples, width]: as `forward` in evaluation mode, for the last token of each sample
        alone. Its query meets the keys and values of all. Samples have tokens."""
        d_qk, d_v = self.heads * self.d_qk, self.heads * self.d_v
        norm, gated = self.input_norm, self.attention_norm
        ends = lengths.cumsum(0)
        normed = F.layer_norm(x, x.shape[1:], norm.weight, norm.bias, EPS)
        w_u, w_v, w_q, w_k = torch.split(self.projection.weight, [d_v, d_v, d_qk, d_qk])
        b_u, b_v, b_q, b_k = torch.split(self.projection.bias, [d_v, d_v, d_qk, d_qk])
        last = normed[ends - 1]
        u, q = F.silu(F.linear(last, w_u, b_u)), F.silu(F.linear(last, w_q, b_q))
        v, k = F.silu(F.linear(normed, w_v, b_v)), F.silu(F.linear(normed, w_k, b_k))
        # [samples, longest]: how far before the last token, and which token of the batch
        distance = torch.arange(int(lengths.max()), device=x.device).expand(len(lengths), -1)
        there = distance < lengths[:, None]
        if visible is not None:
            there &= ~visible.hides(distance, lengths[:, None] - 1 - distance)
        token = torch.where(there, ends[:, None] - 1 - distance, 0)
        shape = *token.shape, self.heads, -1
        scores = (k[token].view(shape) * q.view(len(q), 1, self.heads, -1)).sum(3)
        scores = scores * self.d_qk**-0.5  # [samples, longest, heads]
        if self.position_bias is not None:
            scores = scores + self.position_bias[: token.shape[1], None]
        if self.time_bias is not None and timestamps is not None:
            elapsed = timestamps[ends - 1, None] - timestamps[token]
            bucket = find_buckets(elapsed, len(self.time_bias) - 1)
            scores = scores + self.time_bias[bucket][..., None]
        weights = F.silu(scores) * (there / self.max_length)[..., None]
        attended = (weights[..., None] * v[token].view(shape)).sum(1).flatten(1)
        attended = F.layer_norm(attended, u.shape[1:], gated.weight, gated.bias, EPS) * u
        result: Tensor = x[ends - 1] + self.output(attended)
        return result
