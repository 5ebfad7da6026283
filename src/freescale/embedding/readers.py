"""What stands in a model where its embeddings stood: modules without parameters that read the
tables, and pool rows of bags of ids.

Rows are pooled on the rank that requested them. Features whose rows lie side by side (tables of one
group) are pooled by one operation: its backward makes one gradient of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from freescale.embedding.layout import TableSpec
from freescale.embedding.tables import Tables

POOLINGS = ("sum", "mean")


@dataclass(frozen=True)
class Bags:
    """The bags of one feature: bag i has the ids from offsets[i] to offsets[i + 1]."""

    table: str
    ids: Tensor  # [n]
    offsets: Tensor  # [bags + 1], from 0 to n
    weights: Tensor | None = None  # [n]: each row is multiplied by its own first
    pooling: str = "sum"  # one of POOLINGS


def pool_rows(tables: Tables, features: Sequence[Bags]) -> list[Tensor]:
    """For each feature its pooled rows [bags, width], zeros for an empty bag, out of the rows that
    were fetched. Ids that are the table's padding are left out, of the count of a mean too."""
    pooled: list[Tensor | None] = [None] * len(features)
    together: dict[tuple[int, bool], list[tuple[int, Tensor, Tensor, Tensor | None]]] = {}
    for number, bags in enumerate(features):
        rows, index = tables.locate(bags.table, bags.ids)
        counted, weights = _count_used(tables, bags), bags.weights
        if counted is not None:  # by a weight of zero: dropping ids would read the device
            weights = counted if weights is None else weights * counted
        entry = (number, rows, index, weights)
        together.setdefault((id(rows), weights is not None), []).append(entry)
    for entries in together.values():
        numbers = [number for number, *_ in entries]
        sums = _sum_bags(
            entries[0][1],
            [index for *_, index, _ in entries],
            [features[number].offsets for number in numbers],
            [weights for *_, weights in entries if weights is not None],
        )
        for number, part in zip(numbers, sums, strict=True):
            bags = features[number]
            pooled[number] = part if bags.pooling == "sum" else part / _count_ids(tables, bags)
    return [part for part in pooled if part is not None]


def _sum_bags(
    rows: Tensor, indices: Sequence[Tensor], offsets: Sequence[Tensor], weights: Sequence[Tensor]
) -> Sequence[Tensor]:
    """rows [u, width]; for each feature an index [n] into them, offsets [bags + 1] and, for all
    features or none, weights [n] -> sums [bags, width] of each feature."""
    bags = [each.numel() - 1 for each in offsets]
    index = indices[0] if len(indices) == 1 else torch.cat(list(indices))
    if not index.numel():
        return torch.split(rows.new_zeros(sum(bags), rows.shape[1]), bags)
    begins, begin = [], 0
    for part, each in zip(indices, offsets, strict=True):
        begins.append((each[:-1] + begin).to(index.dtype))
        begin += part.numel()
    begins.append(index.new_full((1,), begin))
    sums = functional.embedding_bag(
        index,
        rows,
        torch.cat(begins),
        mode="sum",
        per_sample_weights=torch.cat(list(weights)).to(rows.dtype) if weights else None,
        include_last_offset=True,
    )
    return torch.split(sums, bags)


def _count_used(tables: Tables, bags: Bags) -> Tensor | None:
    """[n]: 0 for padding, 1 for other ids; None where a table has no padding."""
    spec = tables.specs[bags.table]
    return None if spec.padding is None else (bags.ids != spec.padding).to(spec.dtype)


def _count_ids(tables: Tables, bags: Bags) -> Tensor:
    """[bags, 1]: how many ids a mean divides by."""
    used, dtype = _count_used(tables, bags), tables.specs[bags.table].dtype
    if used is None:
        counts = bags.offsets.diff().to(dtype)
    else:
        ends = torch.cat([used.new_zeros(1), used.cumsum(0)])
        counts = ends[bags.offsets].diff()
    return counts.clamp(min=1)[:, None]


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

    def read(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """What `forward` returns, in another dtype, without a copy in the table's."""
        return self._tables.read(self.table, ids, dtype)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [...] -> (rows [u, width], index [...]); `forward` returns rows[index], a copy."""
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
