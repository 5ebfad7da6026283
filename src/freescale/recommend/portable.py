"""The heads on padded batches, in plain torch, and as programs of `torch.export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from freescale.models.heads import Ranking, Retrieval
from freescale.recommend.padded import PaddedEncoder

LONGEST_BATCH = 1 << 16


@dataclass(frozen=True)
class Input:
    """A tensor that a program reads, all of int64."""

    name: str
    shape: tuple[str | int, ...]  # axes by name, or their size
    meaning: str


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

    def list_inputs(self, places: dict[str, int]) -> list[Input]:
        """The inputs of `forward` that the model reads. `places`: of each source of features."""
        events, users = ("batch", "length"), ("batch", sum(self.user_places))
        ranking = self.judge is not None
        each = ("batch", "candidates") if ranking else ("batch",)
        found = {
            "items": (events, "rows of the items of each history, oldest first"),
            "lengths": (("batch",), "events of each history"),
        }
        if self.encoder.has_time_bias:
            found["times"] = (events, "time of each event, in the unit of the data")
        if self.action is not None:
            found["actions"] = (events, "number of the action of each event")
        if self.event_features is not None:
            found["event_features"] = ((*events, places["event"]), "rows of features of the events")
        if self.user_features is not None:
            found["user_features"] = (users, "rows of features of the users")
        if self.context_features is not None:
            shape = (*each, places["context"])
            found["context_features"] = (shape, "rows of features of the requests")
        if ranking:
            found["candidates"] = (each, "rows of the items to judge")
            if self.encoder.has_time_bias:
                found["candidate_times"] = (each, "time of each request, in the unit of the data")
        return [Input(name, *about) for name, about in found.items()]

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
            parts = user_features.split(list(self.user_places), 1)
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
        outputs = self.encoder(x, lengths, times, users, offered, candidate_times)
        if self.judge is not None:
            return self.judge(outputs).sigmoid()
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, outputs.shape[2])
        queries = outputs.gather(1, last).squeeze(1)
        queries = queries if context is None else queries + context
        if self.normalize:
            queries = F.normalize(queries, dim=-1)
        return queries.masked_fill((lengths == 0)[:, None], 0)


def _sum_rows(table: nn.Module, codes: Tensor) -> Tensor:
    """codes [..., places] -> [..., width]; code 0 is nothing."""
    return (table(codes.clamp(min=0)) * (codes > 0)[..., None]).sum(-2)


def trace(head: PaddedHead, inputs: Sequence[Input]) -> ExportedProgram:
    """Exports the head as a program of these inputs: any number of histories, of any length up to
    the model's, any number of candidates."""
    sizes = {"batch": 2, "length": min(3, head.encoder.longest), "candidates": 4}
    dims = {
        "batch": Dim("batch", max=LONGEST_BATCH),
        "length": Dim("length", max=head.encoder.longest),
        "candidates": Dim("candidates", max=LONGEST_BATCH),
    }
    examples: dict[str, Tensor] = {}
    dynamic: dict[str, dict[int, Any]] = {}
    for each in inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in each.shape]
        examples[each.name] = torch.zeros(shape, dtype=torch.int64)
        axes = enumerate(each.shape)
        dynamic[each.name] = {n: dims[axis] for n, axis in axes if isinstance(axis, str)}
    with torch.no_grad():
        return torch.export.export(head, (), examples, dynamic_shapes=dynamic)
