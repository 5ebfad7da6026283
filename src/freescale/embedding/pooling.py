"""Pooled features: the rows of a bag of ids are added up, or averaged, into one.

Rows travel as they always do, each once, and are pooled on the rank that asked for them. Features
whose rows lie side by side (tables of one group) are pooled by one operation: its backward makes
one gradient of these rows, however many features there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

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
