"""SASRec (arXiv 1808.09781): self-attention with softmax and a feed-forward network in each layer.

Queries are normalised, keys and values are not; the residual of the attention is its normalised
query, that of the feed-forward network its normalised input. Norms have no parameters. This is the
model with a sampled softmax that published tables compare with HSTU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.batch import HostSizes, compute_offsets
from freescale.config import ModelConfig
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton import WeightDropout
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.attention import plan_softmax_attention, softmax_attention
from freescale.kernels.dispatch.layer import drop
from freescale.models.encoder import Encoder
from freescale.models.hstu_layer import get_product_dtype
from freescale.models.prefix import prepare_prefix
from freescale.visible import Visible

EPS = 1e-8  # of the norms
DRAWS = 3  # streams of a layer's dropout: weights of the attention, hidden values, result


class SASRec(Encoder):
    """Causal softmax attention over jagged samples, with learned positions.

    Histories go up to `max_length`. `hidden` is the width inside the feed-forward networks, `width`
    by default. `checkpoint` recomputes each layer's activations in backward; gradients are the same
    to the bit. Dropout applies in training mode and needs the samples' keys. With `visible`, an
    event sees the first events and the last ones, and all of a prefix.
    """

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        max_length: int,
        hidden: int | None = None,
        dropout: float = ModelConfig.dropout,
        input_scale: float | None = ModelConfig.input_scale,
        input_dropout: float | None = ModelConfig.input_dropout,
        checkpoint: bool = ModelConfig.recompute,
        visible: Visible | None = None,
    ) -> None:
        hidden = width if hidden is None else hidden
        super().__init__(
            width=width,
            heads=heads,
            max_length=max_length,
            dropout=dropout,
            input_scale=input_scale,
            input_dropout=input_dropout,
            checkpoint=checkpoint,
            visible=visible,
            layers=layers,
            hidden=hidden,
        )
        if width % heads:
            raise ValueError(f"width={width} is not a multiple of heads={heads}")
        self.heads = heads
        self.layers = nn.ModuleList(
            SASRecLayer(number=number, width=width, heads=heads, hidden=hidden, dropout=dropout)
            for number in range(layers)
        )

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,  # [samples] int64, candidates included
        keys: Tensor | None = None,  # [samples] int64
        timestamps: Tensor | None = None,  # not read
        candidate_counts: Tensor | None = None,  # [samples] int64
        host: HostSizes | None = None,  # sizes of the above; read from the device if None
        prefix: Tensor | None = None,  # [samples, count, width]: tokens that all others see
    ) -> Tensor:  # [tokens, width]
        self._check_width(x)
        plan = self._plan_attention(lengths, candidate_counts, host)
        self._check_sizes(x, plan.tokens, plan.longest_history)
        x, token_keys = self._prepare_inputs(plan, x, keys)
        if prefix is None or not x.shape[0]:
            return self._run_each(x, (token_keys if self.dropout > 0 else None, plan))
        # A softmax runs over all keys at once: the prefix stands before its history.
        count, events = prefix.shape[1], x.shape[0]
        before, prefix_keys = prepare_prefix(
            prefix, self._choose_keys(keys, lengths), x.dtype, self.input_scale,
            1 - self.input_dropout,
        )  # fmt: skip
        owner = torch.repeat_interleave(
            torch.arange(len(lengths), device=x.device), lengths, output_size=events
        )
        places = torch.arange(events, device=x.device) + (owner + 1) * count
        starts = compute_offsets(lengths)[:-1] + torch.arange(len(lengths), device=x.device) * count
        of_prefix = (starts[:, None] + torch.arange(count, device=x.device)).view(-1)
        order = torch.cat([places, of_prefix])
        x = torch.cat([x, before])
        x = torch.empty_like(x).index_copy(0, order, x)
        if token_keys is not None and prefix_keys is not None:
            token_keys = torch.cat([token_keys, prefix_keys])
            token_keys = torch.empty_like(token_keys).index_copy(0, order, token_keys)
        longer = None
        if host is not None:
            longer = replace(host, lengths=host.lengths + count, plans=None)
        plan = self._plan_attention(lengths + count, candidate_counts, longer, count)
        outputs = self._run_each(x, (token_keys if self.dropout > 0 else None, plan))
        return outputs.index_select(0, places)

    def _plan_attention(
        self,
        lengths: Tensor,
        candidate_counts: Tensor | None,
        host: HostSizes | None,
        prefix: int = 0,
    ) -> AttentionPlan | TilePlan:
        return plan_softmax_attention(
            lengths,
            self.heads,
            candidate_counts=candidate_counts,
            visible=self.visible and self.visible.with_prefix(prefix),
            host=host,
            width=self.width // self.heads,
            dtype=get_product_dtype(self.position),
        )

    @property
    def capturable(self) -> bool:
        return type(self) is SASRec and not self.checkpoint


class SASRecLayer(nn.Module):
    """Norm, attention, residual, norm, feed-forward, residual."""

    def __init__(self, *, number: int, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.number = number
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        self.hidden = nn.Linear(width, hidden)
        self.result = nn.Linear(hidden, width)
        # Xavier's, for queries, keys and values as one matrix
        for projection in (self.query, self.key_value):
            nn.init.normal_(projection.weight, std=(2 * width) ** -0.5)
        for projection in (self.output, self.hidden, self.result):
            nn.init.xavier_normal_(projection.weight)
        for projection in (self.query, self.key_value, self.output):
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        token_keys: Tensor | None,  # [tokens] int64; None: nothing is dropped
        plan: AttentionPlan | TilePlan,
    ) -> Tensor:
        queries = normalize(x)
        shape = x.shape[0], self.heads, x.shape[1] // self.heads
        k, v = (part.reshape(shape) for part in self.key_value(x).chunk(2, dim=1))
        stream, keep = DRAWS * self.number, 1 - self.dropout
        attended = softmax_attention(
            self.query(queries).view(shape),
            k,
            v,
            plan=plan,
            alpha=shape[2] ** -0.5,
            dropout=None if token_keys is None else WeightDropout(token_keys, stream, keep),
        )
        middle = normalize(queries + self.output(attended.flatten(1)))
        hidden = drop(plan, self.hidden(middle), token_keys, stream + 1, keep, relu=True)
        return middle + drop(plan, self.result(hidden), token_keys, stream + 2, keep)


def normalize(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)
