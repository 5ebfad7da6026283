"""Features of items and events in a model: rows of a table, added to what they describe.

A source of features (items, events) has one table for all of them. Row 0 stands for nothing: it
fills the places of an item with fewer values than others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from freescale.batch import SequenceBatch
from freescale.config import ModelConfig
from freescale.kernels.dispatch.rows import read_rows
from freescale.models.columns import locate_rows


@dataclass(frozen=True)
class FeatureTables:
    """Rows of the tables of features; 0: there is none."""

    item: int = 0
    event: int = 0
    user: int = 0
    user_places: Sequence[int] = ()  # places of each user feature
    # one tensor per vector feature: [items + 1, width], zeros in the last row
    vectors: Sequence[Tensor] = ()


NO_FEATURES = FeatureTables()


def sum_features(table: nn.Module, codes: Tensor) -> Tensor:
    """codes [..., places], rows of a table of features -> their sum [..., width]."""
    return embed_features(table, codes, [codes.shape[-1]]).squeeze(-2)


def embed_features(table: nn.Module, codes: Tensor, places: Sequence[int]) -> Tensor:
    """codes [..., sum(places)], rows of a table of features -> [..., features, width]: the sum of
    the rows of each feature."""
    rows, (index,) = locate_rows(table, codes)
    flat = torch.where(codes <= 0, -1, index.long()).view(-1, codes.shape[-1])
    sums = [_sum_places(rows, part) for part in torch.split(flat, list(places), dim=1)]
    return torch.stack(sums, dim=1).view(*codes.shape[:-1], len(places), rows.shape[1])


def add_features(own: Tensor, known: Tensor, features: Tensor) -> Tensor:
    """The vectors of items: their own rows [..., width] and those of their features. An item that
    is not `known` [...] bool by its own row, which is noise until it is trained, is described by
    its features alone."""
    return torch.where(known[..., None], own, 0) + features


class VectorFeature(nn.Module):
    """Fixed vectors of items, such as embeddings of their texts, and their projection. Every rank
    holds all of them, outside of checkpoints."""

    vectors: Tensor

    def __init__(self, vectors: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)
        self.projection = nn.Linear(vectors.shape[1], width, bias=False)
        nn.init.normal_(self.projection.weight, std=ModelConfig.row_std or width**-0.5)

    def forward(self, index: Tensor) -> Tensor:
        """index [n] -> [n, width]; -1 is no item."""
        found: Tensor = self.projection(self.vectors[index].to(self.projection.weight.dtype))
        return found


@dataclass(frozen=True)
class ItemVectors:
    """The items that a batch reads, each once."""

    rows: Tensor  # [u, width]
    places: dict[str, Tensor]  # batch feature -> index [...] of its items in `rows`

    def read(self, name: str) -> Tensor:
        """The vectors [..., width] of a batch feature."""
        return read_rows(self.rows, self.places[name])


def describe_items(
    item: nn.Module,
    features: nn.Module,
    batch: SequenceBatch,
    names: Sequence[str],
    vectors: Iterable[nn.Module] = (),
) -> ItemVectors:
    """Computes the vectors of the items of some features of a batch.

    Args:
        item: the table of items.
        features: the table of their features.
        batch: has `NAME`, `NAME_features` and `NAME_known` of each name, as `Histories` makes them;
            with vectors, `NAME_vectors`.
        names: as `history`.
        vectors: each a `VectorFeature`.
    """
    vectors = list(vectors)
    own, places = locate_rows(item, *(batch.values(name) for name in names))
    given = [batch.values(f"{name}_features") for name in names]
    rows, found = locate_rows(features, *given)
    # One entry per item, however often it occurs: all its positions write the same values.
    known = torch.zeros(own.shape[0], dtype=torch.bool, device=own.device)
    codes = torch.full((own.shape[0], given[0].shape[-1]), -1, device=own.device)
    index = torch.full((own.shape[0],), -1, device=own.device)
    for name, place, code, row in zip(names, places, given, found, strict=True):
        at = place.reshape(-1).long()
        known[at] = batch.values(f"{name}_known").reshape(-1)
        codes[at] = torch.where(code <= 0, -1, row.long()).view(-1, codes.shape[1])
        if vectors:
            index[at] = batch.values(f"{name}_vectors").reshape(-1)
    found_vectors = add_features(own, known, _sum_places(rows, codes))
    for feature in vectors:
        found_vectors = found_vectors + feature(index).to(found_vectors.dtype)
    return ItemVectors(found_vectors, dict(zip(names, places, strict=True)))


def _sum_places(rows: Tensor, index: Tensor) -> Tensor:
    """rows [v, width], index [n, places] into them, -1 for nothing -> sums [n, width]."""
    used = (index >= 0).to(rows.dtype)
    return embedding_bag(index.clamp(min=0), rows, mode="sum", per_sample_weights=used)
