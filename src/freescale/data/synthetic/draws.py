"""Draws synthetic batches: lengths, runs of items, and the numbers that decide which events are
bound or hot (see synthetic.py).

A history is made of runs. A run begins at a random point of [0, 1) and each next event steps by a
constant that belongs to the user's taste, modulo 1; an item owns an interval as wide as its
popularity. So every event is Zipf distributed, while the next item depends on the previous one and
on the taste: a model can beat popularity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import compute_offsets
from freescale.data.synthetic.lengths import LengthDistribution
from freescale.random import derive, hash_name, integers, uniform

TASTES = 4
RUN_ENDS = 0.2  # probability that an event starts a new run


@dataclass
class DrawnBatch:
    """One global batch with everything that its items depend on."""

    users: Tensor  # [users] int64
    lengths: Tensor  # [users] int64
    ranks: NDArray[Any]  # [events]: popularity rank before binding
    bound: NDArray[Any]  # [events] in [0, 1)
    hot: NDArray[Any]  # [events] in [0, 1)
    hot_rank: NDArray[Any]  # [events]
    consumer: NDArray[Any]  # [events]: the rank (process) that reads the event
    inside_run: Tensor  # [events] bool
    keys: Tensor  # [events]
    parity: int


@dataclass
class SyntheticSource:
    """Draws batches; each is a pure function of the options and its number."""

    users: int
    items: int
    lengths: LengthDistribution
    popularity: float
    global_batch: int
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        mass = np.arange(1, self.items + 1, dtype=np.float64) ** -self.popularity
        self.item_ends = np.cumsum(mass) / mass.sum()  # [items]
        shuffled = derive(self.seed, hash_name("item ids"), torch.arange(self.items))
        # popular items lie anywhere in the table
        self.id_of_rank = torch.argsort(shuffled, stable=True).numpy()
        # each often enough in a batch
        drawn = self.lengths.mean * min(self.global_batch, self.users)
        self.hot_items = int(np.clip(drawn / 16, 1, self.items))

    @property
    def batches(self) -> int:
        return -(-self.users // self.global_batch)

    def _draw(self, purpose: str, *counters: Tensor | int) -> Tensor:
        return uniform(derive(self.seed, hash_name(purpose), *counters))

    def draw_batch(self, number: int) -> DrawnBatch:
        users = torch.arange(
            number * self.global_batch, min((number + 1) * self.global_batch, self.users)
        )
        lengths = torch.from_numpy(self.lengths.draw(self.seed, users))
        count = len(users)
        # [events]: place of the user in the batch
        owner = torch.repeat_interleave(torch.arange(count), lengths)
        place = torch.arange(len(owner)) - compute_offsets(lengths)[owner]
        keys = derive(self.seed, hash_name("event"), users[owner], place)
        starts = (place == 0) | (uniform(derive(keys, 0)) < RUN_ENDS)
        # of the event's run
        begin = torch.cummax(torch.where(starts, torch.arange(len(owner)), 0), 0).values
        taste = integers(derive(self.seed, hash_name("taste"), users), TASTES)[owner]
        stride = self._draw("stride", torch.arange(TASTES))[taste]
        point = (
            uniform(derive(keys, 1))[begin] + (torch.arange(len(owner)) - begin) * stride
        ) % 1.0
        ranks = np.minimum(np.searchsorted(self.item_ends, point.numpy(), "right"), self.items - 1)
        edges = torch.arange(self.ranks + 1) * count // self.ranks  # users of each rank
        return DrawnBatch(
            users=users,
            lengths=lengths,
            ranks=ranks,
            bound=uniform(derive(keys, 2)).numpy(),
            hot=uniform(derive(keys, 3)).numpy(),
            hot_rank=integers(derive(keys, 4), self.hot_items).numpy(),
            consumer=(torch.searchsorted(edges, owner, right=True) - 1).numpy(),
            inside_run=~starts,
            keys=keys,
            parity=number % 2,
        )

    def choose_items(self, batch: DrawnBatch, mixing: float | None) -> NDArray[Any]:
        """[events] item ids. `mixing`: 0 binds every event, 1 none, 2 makes all hot; None changes
        none."""
        ranks = batch.ranks
        if mixing is not None:
            pairs = self.items // 2  # an odd number leaves out the least popular item
            binding = np.minimum(ranks // 2, pairs - 1) * 2 + batch.parity if pairs else ranks
            ranks = np.where(batch.bound < mixing, ranks, binding)
            ranks = np.where(batch.hot < mixing - 1, batch.hot_rank, ranks)
        ids: NDArray[np.int64] = self.id_of_rank[ranks]
        return ids

    def list_requests(self, batch: DrawnBatch, items: NDArray[Any]) -> NDArray[Any]:
        """Item ids that the batch requests, once per requesting rank."""
        return np.unique(batch.consumer * self.items + items) % self.items
