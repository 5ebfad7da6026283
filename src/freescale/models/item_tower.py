"""The items of your own model, described by their ids and features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from freescale.batch import SequenceBatch
from freescale.models.features import VectorFeature, add_features, sum_features


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
