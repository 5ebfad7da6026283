"""The encoders on padded batches, in plain torch: no kernels, no plans, nothing read from the
device. Slower than the jagged ones, but `torch.export` can trace them.

A row is a token of a sample. The context, which others may see, has the prefix (tokens of the user,
whose slots are negative) and the events. Candidates follow. They see what the next event would see.
Every row sees itself, which is computed apart, so that candidates need no scores of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.kernels.attention.plan import BUCKET_WIDTH
from freescale.models import sasrec
from freescale.models.encoder import Encoder
from freescale.models.hstu import HSTU
from freescale.models.hstu_layer import EPS, HSTULayer
from freescale.models.sasrec import SASRec, SASRecLayer


@dataclass(frozen=True)
class Rows:
    """All rows of a batch, the context first."""

    x: Tensor  # [batch, rows, width]
    slot: Tensor  # [batch, rows]: number in the history, below 0 in the prefix
    times: Tensor | None  # [batch, rows]

    @staticmethod
    def concat(parts: list[Rows]) -> Rows:
        times = [rows.times for rows in parts if rows.times is not None]
        return Rows(
            torch.cat([rows.x for rows in parts], 1),
            torch.cat([rows.slot for rows in parts], 1),
            torch.cat(times, 1) if times else None,
        )


@dataclass(frozen=True)
class Relation:
    """What rows are to the context."""

    seen: Tensor  # [batch, rows, context] bool
    biased: Tensor  # [batch, rows, context] bool: both in the history
    alone: Tensor  # [batch, rows] bool: a row's own score has a bias
    distance: Tensor  # [batch, rows, context] int64
    bucket: Tensor | None  # [batch, rows, context] int64


class PaddedEncoder(nn.Module):
    """An encoder whose histories are padded on the right, in evaluation mode.

    Raises:
        ValueError: The encoder is neither HSTU nor SASRec.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        wide = isinstance(encoder, HSTU) and encoder.wide
        if wide or not isinstance(encoder, HSTU | SASRec):
            raise ValueError(
                f"{'wide ' * wide}{type(encoder).__name__} has no portable form; HSTU and SASRec do"
            )
        self.position = encoder.position
        self.scale, self.longest = encoder.input_scale, encoder.max_length
        self.buckets = encoder.num_time_buckets if isinstance(encoder, HSTU) else 0
        self.has_time_bias, self.visible = encoder.has_time_bias, encoder.visible
        make: Any = _PaddedHSTULayer if isinstance(encoder, HSTU) else _PaddedSASRecLayer
        self.layers = nn.ModuleList(make(layer) for layer in encoder.layers)

    def forward(
        self,
        x: Tensor,  # [batch, events, width]
        lengths: Tensor,  # [batch]
        times: Tensor | None = None,  # [batch, events]
        prefix: Tensor | None = None,  # [batch, count, width]
        candidates: Tensor | None = None,  # [batch, candidates, width]
        candidate_times: Tensor | None = None,  # [batch, candidates]
    ) -> Tensor:  # [batch, events, width], or of the candidates if there are any
        slots = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        there = slots < lengths[:, None]
        groups = [Rows(x * self.scale + self.position[slots], slots, times)]
        first = 0
        if prefix is not None:
            first, shape = prefix.shape[1], prefix.shape[:2]
            slot = torch.arange(-first, 0, device=x.device).expand(shape)
            none = None if times is None else torch.zeros_like(slot)
            groups.insert(0, Rows(prefix * self.scale, slot, none))
            there = torch.cat([there.new_ones(shape), there], 1)
        if candidates is not None:
            last = lengths[:, None].expand(candidates.shape[:2])
            x = candidates * self.scale + self.position[last]
            groups.append(Rows(x, last, candidate_times))
        rows = Rows.concat(groups)
        relation, x = self._relate(rows, there), rows.x
        for layer in self.layers:
            x = layer(x, relation)
        return x[:, first:] if candidates is None else x[:, there.shape[1] :]

    def _relate(self, rows: Rows, there: Tensor) -> Relation:
        """`there` [batch, context]: which rows of the context are not padding."""
        context = there.shape[1]
        slot, at = rows.slot[:, :, None], rows.slot[:, None, :context]  # slots of queries, of keys
        before = at < slot
        biased = before & (at >= 0)
        bucket = None
        if rows.times is not None:
            elapsed = rows.times[:, :, None] - rows.times[:, None, :context]
            logarithm = elapsed.clamp(min=1).to(torch.float64).log() / BUCKET_WIDTH
            bucket = logarithm.clamp(max=self.buckets).to(torch.int64)
        distance = torch.where(biased, slot - at, 0)
        if self.visible is not None:
            before = before & ~self.visible.hides(distance, at)
        return Relation(before & there[:, None], biased, rows.slot >= 0, distance, bucket)


class _PaddedHSTULayer(nn.Module):
    def __init__(self, layer: HSTULayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, relation: Relation) -> Tensor:
        layer, context = self.layer, relation.seen.shape[2]
        heads, d_qk, d_v = layer.heads, layer.d_qk, layer.d_v
        norm, gated = layer.input_norm, layer.attention_norm
        inner = F.silu(
            layer.projection(F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, EPS))
        )
        u, v, q, k = torch.split(inner, [heads * d_v] * 2 + [heads * d_qk] * 2, -1)
        q, k, v = (_split_heads(part, heads) for part in (q * d_qk**-0.5, k, v))
        scores, alone = q @ k[:, :, :context].mT, (q * k).sum(-1)
        for bias, index in (
            (layer.position_bias, relation.distance),
            (layer.time_bias, relation.bucket),
        ):
            if bias is not None:
                assert index is not None
                scores = scores + torch.where(relation.biased, bias[index], 0)[:, None]
                alone = alone + torch.where(relation.alone, bias[0], 0)[:, None]
        out = (F.silu(scores) * relation.seen[:, None]) @ v[:, :, :context]
        out = (out + F.silu(alone)[..., None] * v) / layer.max_length
        out = out.transpose(1, 2).flatten(2)
        out = F.layer_norm(out, gated.weight.shape, gated.weight, gated.bias, EPS) * u
        result: Tensor = x + layer.output(out)
        return result


class _PaddedSASRecLayer(nn.Module):
    def __init__(self, layer: SASRecLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, relation: Relation) -> Tensor:
        layer, context = self.layer, relation.seen.shape[2]
        queries = _normalize(x)
        q, k, v = (
            _split_heads(part, layer.heads)
            for part in (layer.query(queries), *layer.key_value(x).chunk(2, -1))
        )
        q = q * q.shape[-1] ** -0.5
        scores = (q @ k[:, :, :context].mT).masked_fill(~relation.seen[:, None], -torch.inf)
        shares = torch.cat([scores, (q * k).sum(-1, keepdim=True)], -1).softmax(-1)
        out = shares[..., :context] @ v[:, :, :context] + shares[..., context:] * v
        middle = _normalize(queries + layer.output(out.transpose(1, 2).flatten(2)))
        result: Tensor = middle + layer.result(F.relu(layer.hidden(middle)))
        return result


def _normalize(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=sasrec.EPS)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, rows, heads * d] -> [batch, heads, rows, d]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)
