"""The heads on padded batches, in plain torch, and as programs of `torch.export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from freescale.kernels.attention.plan import BUCKET_WIDTH
from freescale.models import sasrec
from freescale.models.encoder import Encoder
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.models.hstu_layer import EPS, HSTULayer
from freescale.models.sasrec import SASRec, SASRecLayer

LONGEST_BATCH = 1 << 16


@dataclass(frozen=True)
class Input:
    """A tensor that a program reads, all of int64."""

    name: str
    shape: tuple[str | int, ...]  # axes by name, or their size
    meaning: str
    below: int | None = None  # values are from 0 and below it; None: any

    def describe(self) -> dict[str, Any]:
        return {"dtype": "int64"} | asdict(self)

    def draw(self, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Random values, with the sizes of axes by name."""
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in self.shape]
        return torch.randint(0, self.below or 10**6, shape, generator=generator)


class PaddedHead(nn.Module):
    """A head whose batches are padded on the right, in evaluation mode.

    What pads is not read: any number of the dtype will do. A history without events is allowed,
    as long as the padded length is at least 1.

    Args:
        module: with plain tables. Features of items are part of the rows of the item table, as
            `load_model` makes them.

    Raises:
        ValueError: The encoder has no portable form.
    """

    def __init__(self, module: Retrieval | Ranking) -> None:
        super().__init__()
        assert module.item_features is None, "rows of items have no features of their own"
        self.encoder = PaddedEncoder(module.encoder)
        self.item = module.item
        self.action = module.action
        self.event_features, self.user_features, self.context_features = (
            module.event_features,
            module.user_features,
            module.context_features,
        )
        self.user_places = module.user_places
        self.normalize = isinstance(module, Retrieval) and module.normalize
        self.judge = module.judge if isinstance(module, Ranking) else None
        self.eval()

    def list_inputs(self, places: Mapping[str, int]) -> list[Input]:
        """The inputs of `forward` that the model reads. `places`: of each source of features."""
        events, users = ("batch", "length"), ("batch", sum(self.user_places))
        each = ("batch", "candidates") if self.judge is not None else ("batch",)
        items, longest = self.item.num_embeddings, self.encoder.longest
        found = [
            Input("items", events, "rows of the items of each history, oldest first", items),
            Input("lengths", ("batch",), "events of each history", longest + 1),
        ]
        if self.encoder.has_time_bias:
            found.append(Input("times", events, "time of each event, in the unit of the data"))
        if self.action is not None:
            below = self.action.num_embeddings
            found.append(Input("actions", events, "number of the action of each event", below))
        for table, name, shape, meaning in (
            (self.event_features, "event_features", (*events, places.get("event", 0)), "events"),
            (self.user_features, "user_features", users, "users"),
            (
                self.context_features,
                "context_features",
                (*each, places.get("context", 0)),
                "requests",
            ),
        ):
            if table is not None:
                meaning = f"rows of features of the {meaning}; 0: nothing"
                found.append(Input(name, shape, meaning, table.num_embeddings))
        if self.judge is not None:
            found.append(Input("candidates", each, "rows of the items to judge", items))
            if self.encoder.has_time_bias:
                meaning = "time of each candidate's request, in the unit of the data"
                found.append(Input("candidate_times", each, meaning))
        return found

    def forward(
        self,
        items: Tensor,  # [batch, length]
        lengths: Tensor,  # [batch]
        times: Tensor | None = None,  # [batch, length]
        actions: Tensor | None = None,  # [batch, length]
        event_features: Tensor | None = None,  # [batch, length, places]
        user_features: Tensor | None = None,  # [batch, places]
        # [batch, places]; for ranking [batch, candidates, places]
        context_features: Tensor | None = None,
        candidates: Tensor | None = None,  # [batch, candidates]
        candidate_times: Tensor | None = None,  # [batch, candidates]
    ) -> Tensor:
        """Retrieval: queries [batch, width]; ranking: probabilities [batch, candidates, tasks]."""
        slots = torch.arange(items.shape[1], device=items.device)
        there = slots < lengths[:, None]
        x = self.item(torch.where(there, items, 0))
        if self.event_features is not None:
            assert event_features is not None
            codes = torch.where(there[..., None], event_features, 0)
            x = x + _sum_rows(self.event_features, codes)
        if self.action is not None:
            assert actions is not None
            x = x + self.action(torch.where(there, actions, 0))
        users, context, offered = None, None, None
        if self.user_features is not None:
            assert user_features is not None
            parts = torch.split(user_features, list(self.user_places), 1)
            users = torch.stack([_sum_rows(self.user_features, part) for part in parts], 1)
        if self.context_features is not None:
            assert context_features is not None
            context = _sum_rows(self.context_features, context_features)
        if self.judge is not None:
            assert candidates is not None
            offered = self.item(candidates)
            offered = offered if context is None else offered + context
        if not self.encoder.has_time_bias:
            times, candidate_times = None, None
        outputs: Tensor = self.encoder(x, lengths, times, users, offered, candidate_times)
        if self.judge is not None:
            return torch.sigmoid(self.judge(outputs))
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, outputs.shape[2])
        queries = outputs.gather(1, last).squeeze(1)
        queries = queries if context is None else queries + context
        if self.normalize:
            queries = F.normalize(queries, dim=-1)
        return queries.masked_fill((lengths == 0)[:, None], 0)


def _sum_rows(table: nn.Embedding, codes: Tensor) -> Tensor:
    """codes [..., places] -> [..., width]; code 0 is nothing."""
    rows: Tensor = table(codes.clamp(min=0))
    return (rows * (codes > 0)[..., None]).sum(-2)


def trace(head: PaddedHead, inputs: Sequence[Input]) -> ExportedProgram:
    """Exports the head as a program of these inputs: any number of histories, of any length up to
    the model's, any number of candidates."""
    longest = head.encoder.longest
    sizes = {"batch": 2, "length": min(3, longest), "candidates": 4}
    dims = {
        "batch": Dim("batch", max=LONGEST_BATCH),
        "length": Dim("length", max=longest),
        "candidates": Dim("candidates", max=LONGEST_BATCH),
    }
    dynamic: dict[str, dict[int, Any]] = {
        each.name: {n: dims[axis] for n, axis in enumerate(each.shape) if isinstance(axis, str)}
        for each in inputs
    }
    generator = torch.Generator().manual_seed(0)
    examples = {each.name: each.draw(sizes, generator) for each in inputs}
    with torch.no_grad():
        return torch.export.export(head, (), examples, dynamic_shapes=dynamic)


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
