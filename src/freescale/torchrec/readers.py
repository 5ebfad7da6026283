"""Replacements of TorchRec's collections: same arguments and results, rows from the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from freescale.embedding.readers import Bags, pool_rows
from freescale.embedding.tables import Tables
from freescale.torchrec.batches import BatchForm


class _Reader:
    """What both kinds of readers share."""

    def _open(self, configs: Any, tables: Tables, names: Sequence[str], form: BatchForm) -> None:
        """`names`: of the tables, in the order of the configs."""
        self._configs, self._tables, self._form = configs, tables, form
        self._read = [
            (name, feature)
            for name, config in zip(names, configs, strict=True)
            for feature in config.feature_names
        ]  # (table, feature) in the order of the results

    @property
    def device(self) -> torch.device:
        return self._tables.transport.device


class BagCollectionReader(_Reader, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """Replaces an EmbeddingBagCollection. Has no parameters."""

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        tables: Tables,
        names: Sequence[str],
        form: BatchForm,
    ) -> None:
        super().__init__()
        self._open(collection.embedding_bag_configs(), tables, names, form)
        self._is_weighted = collection.is_weighted()
        self._embedding_names = collection._embedding_names
        self._widths = collection._lengths_per_embedding
        self._pooling = {
            name: collection.embedding_bags[config.name].mode
            for name, config in zip(names, self._configs, strict=True)
        }

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows: a KeyedTensor [samples, widths of all features]."""
        found, bags = _Features(features, self._form), []
        for table, feature in self._read:
            ids, own = found.get(feature)
            weights = own.weights() if self._is_weighted else None
            bags.append(Bags(table, ids, own.offsets(), weights, self._pooling[table]))
        values = torch.cat(pool_rows(self._tables, bags), dim=1)
        return KeyedTensor(self._embedding_names, self._widths, values)

    def embedding_bag_configs(self) -> Any:
        return self._configs

    def is_weighted(self) -> bool:
        return bool(self._is_weighted)


class CollectionReader(_Reader, EmbeddingCollectionInterface):  # type: ignore[misc]
    """Replaces an EmbeddingCollection. Has no parameters."""

    def __init__(
        self, collection: EmbeddingCollection, tables: Tables, names: Sequence[str], form: BatchForm
    ) -> None:
        super().__init__()
        self._open(collection.embedding_configs(), tables, names, form)
        self._need_indices = collection.need_indices()
        self._width = collection.embedding_dim()
        self._names_by_table = collection.embedding_names_by_table()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The rows of each feature: {its name: JaggedTensor}."""
        found = _Features(features, self._form)
        read = [found.get(feature) for _, feature in self._read]
        readings = zip(self._read, read, strict=True)
        rows = _read_rows(self._tables, [(table, ids) for (table, _), (ids, _) in readings])
        names = [name for names in self._names_by_table for name in names]
        return {
            name: JaggedTensor(
                values=values,
                lengths=own.lengths(),
                weights=ids if self._need_indices else None,
            )
            for name, (ids, own), values in zip(names, read, rows, strict=True)
        }

    def embedding_configs(self) -> Any:
        return self._configs

    def need_indices(self) -> bool:
        return bool(self._need_indices)

    def embedding_dim(self) -> int:
        return int(self._width)

    def embedding_names_by_table(self) -> list[list[str]]:
        return list(self._names_by_table)


class _Features:
    """A KeyedJaggedTensor, feature by feature."""

    def __init__(self, features: Any, form: BatchForm) -> None:
        self._all = features = maybe_td_to_kjt(features, None)
        if features.variable_stride_per_key():
            raise ValueError(
                "a collection was given a KeyedJaggedTensor with a batch size of its own for each "
                "feature, which is not supported"
            )
        self._announced = form.find_announced(features) or {}

    def get(self, feature: str) -> tuple[Tensor, JaggedTensor]:
        """The ids of a feature, as announced if they were, and the feature."""
        known = self._all.keys()
        if feature not in known:
            raise ValueError(
                f"a collection reads feature {feature!r}; the KeyedJaggedTensor has "
                f"{', '.join(known) or 'none'}"
            )
        found = self._all[feature]
        return self._announced.get(feature, found.values()), found


def _read_rows(tables: Tables, readings: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """The rows [n, width] of each (table, ids [n]). On a CPU all rows of a group are read at once,
    so the backward makes one gradient instead of one per feature."""
    if tables.transport.device.type != "cpu":
        return [tables.read(table, ids) for table, ids in readings]
    together: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for number, (table, ids) in enumerate(readings):
        rows, index = tables.locate(table, ids)
        together.setdefault(id(rows), []).append((number, rows, index))
    read: dict[int, Tensor] = {}
    for parts in together.values():
        joined = functional.embedding(torch.cat([index for *_, index in parts]), parts[0][1])
        sizes = [index.numel() for *_, index in parts]
        rows_of = torch.split(joined, sizes)
        read |= dict(zip([number for number, *_ in parts], rows_of, strict=True))
    return [read[number] for number in range(len(readings))]
