"""HSTU (arXiv 2402.17152): the encoder that both heads share. The attention is divided by the
configured maximum length, so that outputs of a sample do not depend on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from freescale.batch import HostSizes
from freescale.config import ModelConfig
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.attention import plan_attention
from freescale.kernels.dispatch.layer import fits_fused_layer, run_layers
from freescale.models.encoder import Encoder
from freescale.models.hstu_layer import EPS, HSTULayer, get_product_dtype
from freescale.models.prefix import Prefix
from freescale.visible import Visible


class HSTU(Encoder):
    """[tokens, width] -> [tokens, width] over jagged samples, each with its history first and then
    its candidates.

    Histories go up to `max_length`. `checkpoint` recomputes each layer's activations in backward;
    gradients are the same to the bit. Dropout applies in training mode and needs the samples' keys.
    `wide` layers are those of DLRM models (`HSTULayer`). With `visible`, an event sees the first
    events and the last ones, and all of a prefix.
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
        input_scale: float | None = ModelConfig.input_scale,
        input_dropout: float | None = ModelConfig.input_dropout,
        position_bias: bool = True,
        time_bias: bool = True,
        num_time_buckets: int = 128,
        checkpoint: bool = ModelConfig.recompute,
        wide: bool = False,
        visible: Visible | None = None,
    ) -> None:
        d_qk = width // heads if d_qk is None and heads > 0 else d_qk
        d_v = width // heads if d_v is None and heads > 0 else d_v
        sizes: dict[str, Any] = {"heads": heads, "d_qk": d_qk, "d_v": d_v}
        shape = {"width": width, "max_length": max_length, "dropout": dropout, **sizes}
        shape["num_time_buckets"] = num_time_buckets
        super().__init__(
            input_scale=input_scale,
            input_dropout=input_dropout,
            checkpoint=checkpoint,
            visible=visible,
            layers=layers,
            **shape,
        )
        assert d_qk is not None and d_v is not None
        self.widths = (d_qk, d_v)
        self.heads = heads
        self.num_time_buckets = num_time_buckets
        self.has_position_bias = position_bias
        self.has_time_bias = time_bias
        self.wide = wide
        self.layers = nn.ModuleList(
            HSTULayer(
                number=number,
                position_bias=position_bias,
                time_bias=time_bias,
                wide=wide,
                **shape,
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
        host: HostSizes | None = None,  # sizes of the above; read from the device if None
        prefix: Tensor | None = None,  # [samples, count, width]: tokens that all others see
    ) -> Tensor:  # [tokens, width]
        inputs = keys, timestamps, candidate_counts, host, prefix
        return self._run_layers(*self._begin(x, lengths, *inputs))

    def _begin(
        self,
        x: Tensor,
        lengths: Tensor,
        keys: Tensor | None,
        timestamps: Tensor | None,
        candidate_counts: Tensor | None,
        host: HostSizes | None,
        prefix: Tensor | None,
    ) -> tuple[Any, ...]:
        """The arguments of `_run_layers`, from those of `forward`."""
        timestamps = self._check_inputs(x, timestamps)
        plan = self._plan_attention(lengths, candidate_counts, timestamps, host)
        self._check_sizes(x, plan.tokens, plan.longest_history)
        x, token_keys = self._prepare_inputs(plan, x, keys)
        before = None
        if prefix is not None and plan.tokens:
            on_host = lengths.cpu() if host is None else host.lengths
            chosen = self._choose_keys(keys, lengths)
            before = Prefix(self, self.heads, self.widths, prefix, on_host, chosen)
        return x, lengths, token_keys, timestamps, candidate_counts, plan, before

    def encode_last(
        self,
        x: Tensor,
        lengths: Tensor,
        keys: Tensor | None = None,
        timestamps: Tensor | None = None,
        host: HostSizes | None = None,
        **options: Any,
    ) -> Tensor:
        """As of any encoder. On a CPU, the last layer computes nothing for other tokens; its sums
        have another order than those of `forward`."""
        plan = self._plan_attention(lengths, None, timestamps, host)
        dtype = get_product_dtype(self.position)
        fused = fits_fused_layer(plan, x, self.heads * self.widths[1], dtype, self.wide)
        plain = type(self) is HSTU and not self.wide
        if options or fused or x.is_cuda or self.training or not plain:
            options["host"] = host
            return super().encode_last(x, lengths, keys, timestamps, **options)
        timestamps = self._check_inputs(x, timestamps)
        self._check_sizes(x, plan.tokens, plan.longest_history)
        x, _ = self._prepare_inputs(plan, x, None)
        for layer in self.layers[:-1]:
            x = layer(x, lengths, None, timestamps, None, plan)
        return cast(HSTULayer, self.layers[-1]).compute_last(x, lengths, timestamps, self.visible)

    def _check_inputs(self, x: Tensor, timestamps: Tensor | None) -> Tensor | None:
        """Returns the timestamps if they are used."""
        self._check_width(x)
        if self.has_time_bias and timestamps is None:
            raise ValueError(
                "the time bias needs timestamps; add them or build the model with time_bias=False"
            )
        return timestamps if self.has_time_bias else None

    def _plan_attention(
        self,
        lengths: Tensor,
        candidate_counts: Tensor | None,
        timestamps: Tensor | None,
        host: HostSizes | None,
        first: Sequence[int] | None = None,  # [samples] the first query of each
    ) -> AttentionPlan | TilePlan:
        return plan_attention(
            lengths,
            self.heads,
            candidate_counts=candidate_counts,
            timestamps=timestamps,
            buckets=self.num_time_buckets if self.has_time_bias else 0,
            distances=self.has_position_bias,
            visible=self.visible,
            host=host,
            widths=self.widths,
            dtype=get_product_dtype(self.position),
            first=first,
        )

    def count_exchanges(self) -> int | None:
        """Of a step with divided histories (`Parts`); None: this encoder cannot divide them."""
        if type(self) is not HSTU:
            return None
        return len(self.layers) * (3 if self.checkpoint else 2) + self.has_time_bias

    @property
    def capturable(self) -> bool:
        return type(self) is HSTU and not self.checkpoint

    def _run_layers(
        self,
        x: Tensor,
        lengths: Tensor,
        token_keys: Tensor | None,
        timestamps: Tensor | None,
        candidate_counts: Tensor | None,
        plan: AttentionPlan | TilePlan,
        prefix: Prefix | None = None,
        attend: Callable[..., Tensor] | None = None,
        layers: slice = slice(None),
    ) -> Tensor:
        """Runs `layers`; arguments as in `HSTULayer.forward`. The prefix is not in x."""
        token_keys = token_keys if self.dropout > 0 else None
        d_qk, d_v = self.widths
        dtype = get_product_dtype(self.position)
        first = layers.start or 0
        # those in C run all layers at once
        alone = prefix is None and attend is None and (not first or isinstance(plan, TilePlan))
        if alone and fits_fused_layer(plan, x, self.heads * d_v, dtype, self.wide):
            return run_layers(
                x,
                [
                    cast(HSTULayer, layer).collect_parameters()
                    for layer in list(self.layers)[layers]
                ],
                plan=plan,
                heads=self.heads,
                d_qk=d_qk,
                d_v=d_v,
                scale_length=self.max_length,
                eps=EPS,
                dtype=dtype,
                keys=token_keys,
                keep=1 - self.dropout,
                recompute=self.checkpoint and torch.is_grad_enabled(),
                first=first,
                wide=self.wide,
            )
        events = x.shape[0]
        if prefix is not None:
            x = torch.cat([x, prefix.inputs])
            if token_keys is not None and prefix.keys is not None:
                token_keys = torch.cat([token_keys, prefix.keys])
        inputs = lengths, token_keys, timestamps, candidate_counts, plan, prefix, attend
        outputs = self._run_each(x, inputs, layers)
        if prefix is None:
            return outputs
        prefix.inputs = outputs[events:]  # of the next layers
        return outputs[:events]
