"""What a synthetic batch is made of: lengths, runs of items, and the draws that bind or heat its
events.

A history is made of runs. A run begins at a random point of [0, 1) and each next event steps by a
constant that belongs to the user's taste, modulo 1; an item owns an interval as wide as its
popularity. So every event is Zipf distributed, while the next item depends on the previous one and
on the taste: a model can beat popularity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.batch import compute_offsets
from freescale.random import derive, hash_name, integers, uniform

SHORTEST = 2  # events of a history
TASTES = 4
RUN_ENDS = 0.2  # probability that an event starts a new run


@dataclass
class Draws:
    """One global batch with everything that its items depend on, drawn once."""

    users: Tensor  # [users] int64
    lengths: Tensor  # [users] int64
    ranks: np.ndarray  # [events]: popularity rank before binding
    bound: np.ndarray  # [events] in [0, 1)
    hot: np.ndarray  # [events] in [0, 1)
    hot_rank: np.ndarray  # [events]
    consumer: np.ndarray  # [events]: the rank (process) that reads the event
    inside_run: Tensor  # [events] bool
    keys: Tensor  # [events]
    parity: int


class Source:
    """Draws batches; a pure function of the options and the number of the batch."""

    def __init__(
        self,
        users: int,
        items: int,
        sizes: np.ndarray,
        popularity: float,
        global_batch: int,
        ranks: int,
        seed: int,
    ):
        self.users = users
        self.items = items
        self.global_batch = global_batch
        self.world = ranks
        self.seed = seed
        self.length_ends = sizes  # [longest + 1]: P(length <= l)
        mass = np.arange(1, items + 1, dtype=np.float64) ** -popularity
        self.item_ends = np.cumsum(mass) / mass.sum()  # [items]
        shuffled = derive(seed, hash_name("item ids"), torch.arange(items))
        # popular items lie anywhere in the table
        self.id_of_rank = torch.argsort(shuffled, stable=True).numpy()
        mean = float((1 - sizes).sum())
        # each often enough in a batch
        self.hot_items = int(np.clip(mean * min(global_batch, users) / 16, 1, items))

    @property
    def batches(self) -> int:
        return -(-self.users // self.global_batch)

    def _draw(self, purpose: str, *counters: Tensor | int) -> Tensor:
        return uniform(derive(self.seed, hash_name(purpose), *counters))

    def batch(self, number: int) -> Draws:
        users = torch.arange(
            number * self.global_batch, min((number + 1) * self.global_batch, self.users)
        )
        lengths = torch.from_numpy(
            np.searchsorted(self.length_ends, self._draw("length", users).numpy(), "right")
        )
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
        edges = torch.arange(self.world + 1) * count // self.world  # users of each rank
        return Draws(
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

    def items_of(self, batch: Draws, mixing: float | None) -> np.ndarray:
        """[events] item ids. mixing: 0 binds every event, 1 none, 2 makes every event hot; None
        leaves them alone."""
        ranks = batch.ranks
        if mixing is not None:
            pairs = self.items // 2  # with an odd number, the least popular item is left out
            binding = np.minimum(ranks // 2, pairs - 1) * 2 + batch.parity if pairs else ranks
            ranks = np.where(batch.bound < mixing, ranks, binding)
            ranks = np.where(batch.hot < mixing - 1, batch.hot_rank, ranks)
        return self.id_of_rank[ranks]

    def requests(self, batch: Draws, items: np.ndarray) -> np.ndarray:
        """Item ids that the batch asks for, once per rank that asks."""
        return np.unique(batch.consumer * self.items + items) % self.items


def length_distribution(
    kind: str, median: float, sigma: float, exponent: float, cap: int
) -> np.ndarray:
    """[cap + 1]: probability of a length of at most l. What falls outside of [SHORTEST, cap] counts
    as the bound."""
    length = np.arange(cap + 1, dtype=np.float64)
    if kind == "lognormal":
        if median <= 0:
            raise ValueError(f"median is {median}; it must be above 0")
        z = (np.log(length + 0.5) - np.log(median)) / max(sigma, 1e-12)
        ends = 0.5 * (1 + torch.erf(torch.from_numpy(z) / 2**0.5).numpy())
    elif kind == "zipf":
        mass = np.where(length >= SHORTEST, np.maximum(length, 1) ** -exponent, 0.0)
        ends = np.cumsum(mass) / mass.sum()
    else:
        raise ValueError(f"lengths is {kind!r}; choose lognormal or zipf")
    ends[:SHORTEST], ends[-1] = 0.0, 1.0
    return ends
