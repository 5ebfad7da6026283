"""Which rows two consecutive batches share, found by their owner, and how requests are divided by
it. Pure functions of the rows asked for: the size of the table does not matter.

A row of batch i+1 that batch i reads too must wait for i's update (it collides). A row of batch i
that batch i+1 reads too must be updated first (it is shared). Whether a row is one or the other is
the same for every rank that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.dispatch import collision_masks
from freescale.kernels.reference.unique import group_by_tag
from freescale.kernels.upload import upload

# (rows asked by the current batch, by the coming one) -> (which of the current ones are shared,
# which of the coming ones collide)
Masks = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

__all__ = ["Asked", "Masks", "collision_masks", "divided", "pieces_for"]

# What is not urgent travels in pieces, so that the buffers of both ends stay small beside the
# batch. A piece has at least so many bytes: an AllToAll of less is all latency.
_LEAST_BYTES = {"cpu": 1 << 20, "cuda": 4 << 20}
# bytes of a piece for one of the ranks: with thousands of them, less is all latency
_LEAST_MESSAGE = 16 << 10
_MOST_PIECES = 64


def pieces_for(bytes_per_rank: int, device: torch.device, ranks: int = 1) -> int:
    """A power of two, the same on every rank if the bytes (a mean over ranks) are."""
    least = max(_LEAST_BYTES[device.type], _LEAST_MESSAGE * ranks)
    wanted = min(_MOST_PIECES, bytes_per_rank // least)
    return 1 << max(0, int(wanted).bit_length() - 1)


@dataclass(frozen=True)
class Asked:
    """Requests for owners' rows, in the order of the ranks they go to or come from."""

    marked: Tensor  # [n] bool
    rows: Tensor  # [n]
    sizes: Sequence[int]  # of each rank
    pieces: int

    @property
    def bins(self) -> int:
        return (1 + self.pieces) * len(self.sizes)


def divided(several: Sequence[Asked]) -> tuple[list[Tensor], Tensor]:
    """-> (positions of each, how many [sum of bins]).

    First come those that are marked, then the others piece by piece, each of these rank by rank, in
    their order; the counts are [(1 + pieces) * ranks]. A row is always in the same piece, whoever
    asks for it, so that a piece has all that there is of a row. All are divided by one sort: beside
    the compute every kernel waits for its turn.
    """
    device = several[0].rows.device
    sizes, edges = (
        [asked.rows.numel() for asked in several],
        np.cumsum([0] + [asked.bins for asked in several]),
    )
    # What a request's tag begins with: its rank, and the bins of those before.
    first = np.concatenate(
        [edge + np.arange(len(asked.sizes)) for edge, asked in zip(edges, several)]
    )
    counts = np.concatenate([np.asarray(asked.sizes, np.int64) for asked in several])
    tags, times = upload(np.stack([first, counts]), device)
    tags = torch.repeat_interleave(tags, times, output_size=sum(sizes))
    pieces = [
        torch.where(asked.marked, 0, ((asked.rows & (asked.pieces - 1)) + 1) * len(asked.sizes))
        for asked in several
    ]
    order, found = group_by_tag(tags.add_(torch.cat(pieces)), int(edges[-1]))
    starts = np.cumsum([0] + sizes[:-1])
    return [
        part - int(start) for part, start in zip(order.split(sizes), starts, strict=True)
    ], found
