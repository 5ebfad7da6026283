"""HSTU (arXiv 2402.17152): the encoder that both heads share.

A sample's outputs depend on that sample alone: the attention is divided by the configured maximum
length, dropout is drawn from the sample's own key, and nothing is normalised over the batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from freescale.batch import HostSizes, offsets_of
from freescale.config import ModelConfig
from freescale.kernels.dispatch import (
    gated_norm,
    hstu_attention,
    layer_norm,
    plan_attention,
    silu_split,
)
from freescale.kernels.reference.attention import AttentionPlan
from freescale.kernels.triton.attention_plan import TilePlan
from freescale.random import derive

TOO_LONG = (
    "a history has {} events, the model was built for max_length={}; cut the histories or "
    "raise max_length"
)


def positions_in_sample(lengths: Tensor, tokens: int) -> Tensor:
    """[samples] lengths -> [tokens]: 0, 1, 2, ... within each sample."""
    starts = torch.repeat_interleave(offsets_of(lengths)[:-1], lengths, output_size=tokens)
    return torch.arange(tokens, device=lengths.device) - starts


def product_dtype(parameter: Tensor) -> torch.dtype:
    """What a matrix product with this parameter is computed in. Autocast leaves float64 alone."""
    kind = parameter.device.type
    cast = torch.is_autocast_enabled(kind) and parameter.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else parameter.dtype


def projected(linear: nn.Linear, x: Tensor) -> Tensor:
    """linear(x) for x [tokens, in]. For a product with a transposed matrix torch asks oneDNN on ARM
    processors, which prepares each for half a millisecond: longer than a small request's products
    take. A served model lays the matrix out as it is read."""
    served = (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
    # of few tokens the copy would be the larger part
    if not served or x.shape[0] < linear.out_features:
        return linear(x)
    return torch.addmm(linear.bias, x, linear.weight.t().contiguous())


class InputNorm(nn.LayerNorm):
    """LayerNorm in the dtype of the projection that follows."""

    def forward(self, x: Tensor, plan: AttentionPlan | TilePlan) -> Tensor:  # type: ignore[override]
        return layer_norm(plan, x, self.weight, self.bias, self.eps, product_dtype(self.weight))


class GatedNorm(nn.LayerNorm):
    """LayerNorm, gate and dropout, in the dtype of the projection that follows. Drops nothing
    without keys."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        gate: Tensor,
        plan: AttentionPlan | TilePlan,
        keys: Tensor | None,
        stream: int,
        keep: float,
    ) -> Tensor:
        parameters = self.weight, self.bias, self.eps, product_dtype(self.weight)
        return gated_norm(plan, x, gate, *parameters, keys=keys, stream=stream, keep=keep)


class Earlier(Protocol):
    """What a layer's tokens see beyond the samples of its plan: a sum that is added to theirs."""

    def attended(
        self, layer: HSTULayer, plan: AttentionPlan | TilePlan, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor | None: ...


class HSTULayer(nn.Module):
    """LayerNorm, projection to u, v, q, k, attention, gate by u, dropout, projection back,
    residual."""

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
        reach: int | None = None,  # positions that two tokens may be apart, if not max_length
    ) -> None:
        super().__init__()
        self.number = number
        self.heads = heads
        self.d_qk = d_qk
        self.d_v = d_v
        self.max_length = max_length
        self.dropout = dropout
        self.input_norm = InputNorm(width, eps=1e-6)
        self.projection = nn.Linear(width, 2 * heads * (d_qk + d_v))
        self.attention_norm = GatedNorm(heads * d_v, eps=1e-6)
        self.output = nn.Linear(heads * d_v, width)
        self.position_bias = (
            nn.Parameter(torch.empty((reach or max_length) + 1)) if position_bias else None
        )
        self.time_bias = nn.Parameter(torch.empty(num_time_buckets + 1)) if time_bias else None
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        for bias in (self.position_bias, self.time_bias):
            if bias is not None:
                nn.init.normal_(bias, std=0.02)

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,
        token_keys: Tensor | None,  # [tokens] int64
        timestamps: Tensor | None,
        candidate_counts: Tensor | None,
        plan: AttentionPlan | TilePlan,
        earlier: Earlier | None = None,
    ) -> Tensor:
        sizes = [self.heads * self.d_v] * 2 + [self.heads * self.d_qk] * 2
        u, v, q, k = silu_split(plan, projected(self.projection, self.input_norm(x, plan)), sizes)
        q, k = (part.unflatten(1, (self.heads, self.d_qk)) for part in (q, k))
        v = v.unflatten(1, (self.heads, self.d_v))
        attended = hstu_attention(
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
        beyond = None if earlier is None else earlier.attended(self, plan, q, k, v)
        if beyond is not None:
            attended = attended + beyond
        gated = self.attention_norm(
            attended.flatten(1), u, plan, token_keys, self.number, 1 - self.dropout
        )
        return x + projected(self.output, gated)  # gated is [tokens, heads * d_v]


class HSTU(nn.Module):
    """[tokens, width] -> [tokens, width] over jagged samples, each with its history first and then
    its candidates.

    Histories go up to `max_length`. `checkpoint` recomputes each layer's activations in backward;
    gradients are the same to the bit. Dropout applies in training mode and needs the samples' keys.
    """

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        max_length: int,
        d_qk: int | None = None,
        d_v: int | None = None,
        dropout: float = ModelConfig.dropout,
        position_bias: bool = ModelConfig.position_bias,
        time_bias: bool = ModelConfig.time_bias,
        num_time_buckets: int = 128,
        checkpoint: bool = ModelConfig.recompute,
        reach: int | None = None,
    ) -> None:
        super().__init__()
        d_qk = width // heads if d_qk is None and heads > 0 else d_qk
        d_v = width // heads if d_v is None and heads > 0 else d_v
        named = dict(
            width=width,
            layers=layers,
            heads=heads,
            max_length=max_length,
            num_time_buckets=num_time_buckets,
        )
        for name, value in (named | dict(d_qk=d_qk, d_v=d_v)).items():
            if value is None or value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {dropout}")
        assert d_qk is not None and d_v is not None
        self.width = width
        self.widths = (d_qk, d_v)
        self.heads = heads
        self.max_length = max_length
        self.dropout = dropout
        self.checkpoint = checkpoint
        self.num_time_buckets = num_time_buckets
        self.has_position_bias = position_bias
        self.has_time_bias = time_bias
        # a parameter and no nn.Embedding: it is dense, every step touches most of it
        self.position = nn.Parameter(torch.empty(max_length + 1, width))
        nn.init.normal_(self.position, std=width**-0.5)
        self.layers = nn.ModuleList(
            HSTULayer(
                number=number,
                width=width,
                heads=heads,
                d_qk=d_qk,
                d_v=d_v,
                max_length=max_length,
                dropout=dropout,
                position_bias=position_bias,
                time_bias=time_bias,
                num_time_buckets=num_time_buckets,
                reach=reach,
            )
            for number in range(layers)
        )

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,  # [samples] int64, candidates included
        keys: Tensor | None = None,  # [samples] int64
        timestamps: Tensor | None = None,  # [tokens] int64
        candidate_counts: Tensor | None = None,  # [samples] int64
        host: HostSizes | None = None,  # of the above; without it they are read from the device
    ) -> Tensor:  # [tokens, width]
        timestamps = self._checked(x, timestamps)
        plan = self._plan(lengths, candidate_counts, timestamps, host)
        if plan.longest_history > self.max_length:
            raise ValueError(TOO_LONG.format(plan.longest_history, self.max_length))
        if plan.tokens != x.shape[0]:
            raise ValueError(f"lengths add up to {plan.tokens}, but there are {x.shape[0]} tokens")
        slots = positions_in_sample(lengths, x.shape[0])
        positions = slots
        if candidate_counts is not None:  # all candidates of a sample stand right after its history
            history = torch.repeat_interleave(
                lengths - candidate_counts, lengths, output_size=x.shape[0]
            )
            positions = torch.minimum(slots, history)
        token_keys = self._token_keys(keys, lengths, slots)
        # the encoder's own dtype, whatever the tables hold
        x = x.to(self.position.dtype) + self.position[positions]
        return self._through(x, lengths, token_keys, timestamps, candidate_counts, plan)

    def _checked(self, x: Tensor, timestamps: Tensor | None) -> Tensor | None:
        """The timestamps, if they are used."""
        if x.ndim != 2 or x.shape[1] != self.width:
            raise ValueError(f"the encoder takes [tokens, {self.width}], not {list(x.shape)}")
        if self.has_time_bias and timestamps is None:
            raise ValueError(
                "the time bias needs timestamps; add them or build the model with time_bias=False"
            )
        return timestamps if self.has_time_bias else None

    def _plan(
        self,
        lengths: Tensor,
        candidate_counts: Tensor | None,
        timestamps: Tensor | None,
        host: HostSizes | None,
    ) -> AttentionPlan | TilePlan:
        return plan_attention(
            lengths,
            self.heads,
            candidate_counts=candidate_counts,
            timestamps=timestamps,
            buckets=self.num_time_buckets if self.has_time_bias else 0,
            distances=self.has_position_bias,
            host=host,
            widths=self.widths,
            dtype=product_dtype(self.position),
        )

    @property
    def drops(self) -> bool:
        return self.training and self.dropout > 0

    def _token_keys(
        self, keys: Tensor | None, lengths: Tensor, slots: Tensor | None
    ) -> Tensor | None:
        """[tokens] keys of what is dropped, from the samples' and the place in the sample; None
        where nothing is."""
        if not self.drops:
            return None
        assert slots is not None
        if keys is None or keys.shape != lengths.shape:
            raise ValueError(
                f"dropout needs keys, one per sample ({lengths.numel()}); got {_described(keys)}"
            )
        return derive(torch.repeat_interleave(keys, lengths, output_size=slots.numel()), slots)

    def _through(self, x: Tensor, *inputs: Any) -> Tensor:
        """Through all layers; `inputs` are those of a layer after x."""
        for layer in self.layers:
            if self.checkpoint and torch.is_grad_enabled():
                # dropout is a function of keys: there is no generator state to keep
                x = recompute(layer, x, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, *inputs)
        return x


def _described(keys: Tensor | None) -> str:
    return "none" if keys is None else f"{keys.dtype} {list(keys.shape)}"
