"""The order of the samples in an epoch: a pure function of (seed, epoch) and the sizes of the row
groups."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import torch
from torch import Tensor

from freescale.batch import compute_offsets, concat_ranges
from freescale.data.batches.specs import ReadSpec
from freescale.random import derive, hash_name

_GROUPS, _ROWS = hash_name("order of row groups"), hash_name("order of rows")


class EpochOrder:
    """Row groups are permuted, then rows inside windows of `shuffle_groups` consecutive permuted
    row groups.

    A reader that holds one window reads every row group once per epoch. Memory: O(row groups) and
    two windows.

    Args:
        starts: [groups + 1]: first sample of each row group.
        read: seed, and how much is shuffled together.
        chosen: [n] the samples that an epoch visits, ascending. None: all.
    """

    def __init__(self, starts: Tensor, read: ReadSpec, chosen: Tensor | None = None):
        self.starts, self._chosen = starts, chosen
        self._firsts = starts if chosen is None else torch.searchsorted(chosen, starts)
        self.seed, self.shuffle, self.window = read.seed, read.shuffle, read.shuffle_groups
        self._sizes = self._firsts[1:] - self._firsts[:-1]
        self.groups = lru_cache(2)(self._groups)
        self._shuffled_window = lru_cache(2)(self._shuffle_window)
        self._edges = lru_cache(2)(self._find_edges)

    def _groups(self, epoch: int) -> Tensor:
        """Row groups in the order in which the epoch reads them."""
        numbers = torch.arange(len(self._sizes))
        if not self.shuffle:
            return numbers
        return torch.argsort(derive(self.seed, _GROUPS, epoch, numbers), stable=True)

    def _shuffle_window(self, epoch: int, number: int) -> Tensor:
        groups = self.groups(epoch)[number * self.window : (number + 1) * self.window]
        samples = self._list_chosen(concat_ranges(self._firsts[groups], self._sizes[groups]))
        return samples[torch.argsort(derive(self.seed, _ROWS, epoch, samples), stable=True)]

    def _list_chosen(self, places: Tensor) -> Tensor:
        return places if self._chosen is None else self._chosen[places]

    def _find_edges(self, epoch: int) -> list[int]:
        """[windows + 1]: positions of the epoch at which its windows begin; the last one's end."""
        ends = compute_offsets(self._sizes[self.groups(epoch)])  # [groups + 1]
        return [*ends[: -1 : self.window].tolist(), int(ends[-1])]

    def samples(self, epoch: int, first: int, last: int) -> Tensor:
        """Sample indices at positions [first, last) of the epoch; to be read only."""
        if not self.shuffle:
            return self._list_chosen(torch.arange(first, last))
        edges = self._edges(epoch)
        low = bisect_right(edges, first) - 1
        parts = []
        while low + 1 < len(edges) and edges[low] < last:
            start = edges[low]
            parts.append(self._shuffled_window(epoch, low)[max(first - start, 0) : last - start])
            low += 1
        if len(parts) == 1:
            return parts[0]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
