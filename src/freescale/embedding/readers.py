"""What stands in a model where its embeddings stood: modules without parameters that read the
tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from freescale.embedding.layout import TableSpec
from freescale.embedding.pooling import Bags, pool_rows
from freescale.embedding.tables import Tables


class TableReader(nn.Module):
    """Stands where an nn.Embedding stood. Has no parameters: the rows live in the tables."""

    def __init__(self, tables: Tables, spec: TableSpec) -> None:
        super().__init__()
        self._tables = tables
        self.table = spec.name
        self.num_embeddings = spec.rows
        self.embedding_dim = spec.width
        self.padding_idx = spec.padding

    def forward(self, input: Tensor) -> Tensor:
        """ids [...] -> rows [..., width]."""
        return self._tables.read(self.table, input)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [...] -> (rows [u, width], index [...]): what `forward` returns is rows[index], of
        which nothing is copied here."""
        return self._tables.locate(self.table, ids)

    def find_log_q(self, ids: Tensor) -> Tensor | None:
        """ids [...] of a training batch -> [...]: the logs of their probabilities as draws from the
        batch, but for a constant, where the table counts them (`Dynamic(draws=...)`)."""
        return self._tables.find_log_q(self.table, ids)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise RuntimeError(
                f"module {self.table!r} is a sharded table and has no whole weight: call the "
                "module with ids instead"
            )
        return super().__getattr__(name)


class BagReader(TableReader):
    """Stands where an nn.EmbeddingBag stood, and takes what it took."""

    def __init__(self, tables: Tables, spec: TableSpec, bag: nn.EmbeddingBag) -> None:
        super().__init__(tables, spec)
        self.mode = bag.mode
        self.include_last_offset = bag.include_last_offset

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """input [n] with offsets [bags], or with `include_last_offset` [bags + 1], or input
        [bags, n] without offsets -> pooled rows [bags, width]. `per_sample_weights`, of the shape
        of input, multiply the rows."""
        if input.dim() not in (1, 2) or (input.dim() == 1) != (offsets is not None):
            given = "no" if offsets is None else "with"
            raise ValueError(
                f"module {self.table!r} takes ids [n] with offsets [bags], or ids [bags, n] "
                f"without; it got ids {list(input.shape)}, {given} offsets"
            )
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ValueError(
                    f"module {self.table!r} pools by {self.mode!r}: per_sample_weights are for "
                    "mode='sum' alone"
                )
            if per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"module {self.table!r} got per_sample_weights "
                    f"{list(per_sample_weights.shape)} for ids {list(input.shape)}"
                )
        if offsets is None:
            count, size = input.shape
            offsets = torch.arange(count + 1, dtype=torch.int64, device=input.device) * size
        elif not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), input.numel())])
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        bags = Bags(self.table, input.reshape(-1), offsets, weights, self.mode)
        return pool_rows(self._tables, [bags])[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
