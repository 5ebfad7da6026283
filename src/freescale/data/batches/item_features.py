"""Adds the features of items to the batches that have the items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from freescale.batch import SequenceBatch

_ITEMS = {"history", "targets", "negatives", "candidates"}  # features of a batch


def join_items(
    batch: SequenceBatch, find: Callable[[Tensor], Mapping[str, Tensor]]
) -> SequenceBatch:
    """Adds what `find` returns for the ids of items, as `NAME_features` and so on, to each feature
    of items, where it is."""

    def extend(columns: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(columns)
        for name in _ITEMS & columns.keys():
            part = columns[name]
            of_tensor = isinstance(part, Tensor)
            for kind, values in find(part if of_tensor else part.values).items():
                found[f"{name}_{kind}"] = values if of_tensor else replace(part, values=values)
        return found

    return replace(
        batch,
        sequences=extend(batch.sequences),
        candidates=extend(batch.candidates),
        dense=extend(batch.dense),
        shared=extend(batch.shared),
    )
