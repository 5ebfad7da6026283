"""Features of items and events in a model: rows of a table, added to what they describe.

A source of features (items, events) has one table for all of them. Row 0 stands for nothing: it
fills the places of an item with fewer values than others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from freescale.batch import SequenceBatch
from freescale.config import ModelConfig
from freescale.kernels.dispatch.rows import read_rows, sum_rows
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
    context: int = 0
    item_places: int = 0  # columns of codes of an item, over all its features
    context_places: int = 0


NO_FEATURES = FeatureTables()


def sum_features(table: nn.Module, codes: Tensor) -> Tensor:
    """codes [..., places], rows of a table of features -> their sum [..., width]."""
    return embed_features(table, codes, [codes.shape[-1]]).squeeze(-2)


def embed_features(table: nn.Module, codes: Tensor, places: Sequence[int]) -> Tensor:
    """codes [..., sum(places)], rows of a table of features -> [..., features, width]: the sum of
    the rows of each feature."""
    rows, (index,) = locate_rows(table, codes)
    flat = torch.where(codes <= 0, -1, index).view(-1, codes.shape[-1])
    sums = [sum_rows(rows, part) for part in torch.split(flat, list(places), dim=1)]
    return torch.stack(sums, dim=1).view(*codes.shape[:-1], len(places), rows.shape[1])


def add_features(rows: Tensor, weights: Tensor, features: Tensor) -> Tensor:
    """The vectors of items: their own rows [..., width], as much as they count (`weights` [...],
    from 0 to 1), and the sums of their features. The fewer events an item has, the less its own row
    tells, and it is described by its features."""
    return torch.addcmul(features, rows, weights.to(rows.dtype)[..., None])


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
        batch: has `NAME`, `NAME_features` and `NAME_own` of each name, as `Histories` makes them;
            with vectors, `NAME_vectors`.
        names: as `history`.
        vectors: each a `VectorFeature`.
    """
    own, places = locate_rows(item, *(batch.values(name) for name in names))
    codes = [batch.values(f"{name}_features") for name in names]
    rows, index = locate_rows(features, *codes)
    at = torch.cat([place.reshape(-1) for place in places]).long()
    # An item is described once, however often it occurs. All its positions have the same columns,
    # so any of them will do; rows that no position reads take zeros, behind the last position.
    position = torch.arange(at.numel(), device=at.device)
    one = at.new_full((own.shape[0],), at.numel()).scatter_(0, at, position)

    def take(parts: Sequence[Tensor], axes: int = 0) -> Tensor:
        flat = [part.reshape(-1, *part.shape[part.ndim - axes :]) for part in parts]
        return torch.cat([*flat, flat[0].new_zeros(1, *flat[0].shape[1:])])[one]

    weights = take([batch.values(f"{name}_own") for name in names])
    used = torch.where(take(codes, 1) <= 0, -1, take(index, 1))
    found = add_features(own, weights, sum_rows(rows, used))
    for feature in vectors:
        numbers = take([batch.values(f"{name}_vectors") for name in names])
        found = found + feature(numbers).to(found.dtype)
    return ItemVectors(found, dict(zip(names, places, strict=True)))


class ItemTower(nn.Module):
    """The vectors of items, as the heads compute them: own rows, rows of features and projections
    of fixed vectors, added up. An item whose own row does not count is its features alone. Users
    are described in the same way. Plain torch: `parallelize` makes tables of the embeddings.

    Args:
        items: rows of the table `item`.
        width: of the vectors.
        features: rows of the table `item_features`; 0: there is none.
        vectors: of items, [items + 1, numbers] each, such as embeddings of their texts.
        device: `meta` for tables whose rows `parallelize` draws.
    """

    def __init__(
        self,
        items: int,
        width: int,
        features: int = 0,
        vectors: Sequence[Tensor] = (),
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.item = nn.Embedding(items, width, device=device)
        self.item_features = nn.Embedding(features, width, device=device) if features else None
        self.item_vectors = nn.ModuleList(VectorFeature(each, width) for each in vectors)
        for table in (self.item, self.item_features):
            if table is not None:
                nn.init.normal_(table.weight, std=width**-0.5)

    def forward(self, batch: SequenceBatch, name: str = "item") -> Tensor:
        """[..., width] for the ids `name` of a batch, with `NAME_own` and, as far as the tower
        has them, `NAME_features` and `NAME_vectors`. Rows of one item may differ in features."""
        rows, own = self.item(batch.values(name)), batch.values(f"{name}_own")
        found = torch.zeros_like(rows)
        if self.item_features is not None:
            found = sum_features(self.item_features, batch.values(f"{name}_features"))
        for feature in self.item_vectors:
            found = found + feature(batch.values(f"{name}_vectors")).to(rows.dtype)
        return add_features(rows, own, found)
