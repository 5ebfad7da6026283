"""Exact search among the items of a model."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged
from freescale.data.batches.windows import list_ranges
from freescale.kernels.best_items import find_best
from freescale.kernels.softmax.scores import choose_tile, split_queries
from freescale.recommend.catalogue import UNKNOWN, Catalogue
from freescale.recommend.inputs import Past


class ItemSearch:
    """Finds the best items of queries, and scores given ones.

    Args:
        items: the catalogue.
        vectors: [items, width] what queries are multiplied with.
    """

    def __init__(self, items: Catalogue, vectors: Tensor) -> None:
        self._items, self._vectors = items, vectors
        self._last: tuple[NDArray[np.int64], Tensor] | None = None  # candidates

    def find(
        self,
        queries: Tensor,
        past: Past,
        k: int,
        exclude_seen: NDArray[np.bool_],
        candidates: NDArray[np.int64] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """As `Recommender.recommend_requests`; `exclude_seen` [users]."""
        listed = self._items.listed if candidates is None else candidates
        vectors = self._listed if candidates is None else self._select(candidates)
        k = min(k, len(listed))
        rows = np.full((len(past), k), -1)
        scores = np.full((len(past), k), np.nan, np.float32)
        starts, counts = past.starts, np.where(exclude_seen, past.lengths, 0)
        some = torch.from_numpy(np.flatnonzero(past.lengths))
        for part, users in split_queries(queries[some.to(queries.device)], some):
            numbers = users.numpy()
            seen = None
            if counts[numbers].any():
                items = past.items[list_ranges(starts[numbers], counts[numbers])]
                places = np.searchsorted(listed, items).clip(max=len(listed) - 1)
                places = np.where(listed[places] == items, places, -1)
                seen = Jagged(torch.from_numpy(places), torch.from_numpy(counts[numbers]))
            best, found = find_best(part, vectors, k, tile=choose_tile(len(listed)), left_out=seen)
            values = best.cpu().numpy()
            rows[numbers] = np.where(np.isneginf(values), -1, listed[found.cpu().numpy()])
            scores[numbers] = values
        if len(some) < len(past):
            popular = self._items.popular
            rows[past.lengths == 0] = popular[np.isin(popular, listed)][:k]
        return rows, scores

    def score(self, query: Tensor, rows: NDArray[np.int64], events: bool) -> NDArray[np.float32]:
        """Scores items [n] for a query [width]; NaN for unknown items, and without `events`."""
        known = torch.from_numpy(rows.clip(0, len(self._items) - 1)).to(query.device)
        values = (self._vectors[known] @ query).cpu().numpy()
        unknown = (rows == UNKNOWN) | (rows >= len(self._items)) | (not events)
        return np.where(unknown, np.float32(np.nan), values)

    @cached_property
    def _listed(self) -> Tensor:
        return self._gather(self._items.listed)

    def _select(self, rows: NDArray[np.int64]) -> Tensor:
        """The vectors of candidates. The last choice is kept."""
        if self._last is None or not np.array_equal(self._last[0], rows):
            self._last = rows, self._gather(rows)
        return self._last[1]

    def _gather(self, rows: NDArray[np.int64]) -> Tensor:
        if len(rows) == len(self._items):
            return self._vectors
        return self._vectors[torch.from_numpy(rows).to(self._vectors.device)]
