"""Rows that owners and requesters divide alike: the part and the rank of each as one number, its
tag. The twin for a GPU is `triton.division`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.upload import upload


@dataclass(frozen=True)
class MarkedRows:
    """Requested rows of owners, in the order of the ranks that they go to or come from."""

    marked: Tensor  # [n] bool
    rows: Tensor  # [n]
    sizes: Sequence[int]  # of each rank
    pieces: int  # a power of two

    @property
    def bins(self) -> int:
        return (1 + self.pieces) * len(self.sizes)


def find_first_tags(lists: Sequence[MarkedRows]) -> list[int]:
    """Of each list, and behind the last one: a list has as many tags as bins."""
    return [0, *np.cumsum([one.bins for one in lists]).tolist()]


def tag_rows(lists: Sequence[MarkedRows]) -> Tensor:
    """[n] int32, of all lists one after another. In each list: the marked rows rank by rank, then
    the others piece by piece and within each rank by rank. A row is always in the same piece,
    whoever requests it."""
    first = find_first_tags(lists)
    begins = [edge + np.arange(len(one.sizes)) for edge, one in zip(first, lists, strict=False)]
    counts = [np.asarray(one.sizes, np.int64) for one in lists]
    table = np.stack([np.concatenate(begins), np.concatenate(counts)])
    tags, times = upload(table, lists[0].rows.device)
    tags = torch.repeat_interleave(tags, times, output_size=int(table[1].sum()))
    pieces = [
        torch.where(one.marked, 0, ((one.rows & (one.pieces - 1)) + 1) * len(one.sizes))
        for one in lists
    ]
    return tags.add_(torch.cat(pieces)).to(torch.int32)
