"""What one rank reads of a group of tables in one step, and how it is divided on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.layout import TableSpec, announced_ids

# A batch's ids of one group: (table index within the group, the batch's own tensor of ids).
Announced = Sequence[tuple[int, Tensor]]


def announced(batches: Sequence[SequenceBatch], specs: Sequence[TableSpec]) -> Announced:
    return [
        (table, ids)
        for table, spec in enumerate(specs)
        for batch in batches
        for _, ids in announced_ids(batch, spec)
    ]


class Index:
    """Finds the fetched row of an id: by identity for the tensors that were announced, else by
    search."""

    def __init__(self, keys: Tensor, announced: Announced, inverse: Tensor) -> None:
        self.keys = keys  # [u] sorted
        parts = inverse.split([ids.numel() for _, ids in announced])
        self._known = [
            (table, ids, ids._version, part)
            for (table, ids), part in zip(announced, parts, strict=True)
        ]

    def known(self, table: int, ids: Tensor) -> Tensor | None:
        for owner, tensor, version, part in self._known:
            same = tensor is ids or (
                tensor.data_ptr() == ids.data_ptr() and tensor.numel() == ids.numel() > 0
            )
            same = same and tensor.is_contiguous()
            if (
                same
                and owner == table
                and ids._version == version
                and ids.is_contiguous()
                and ids.dtype == tensor.dtype
            ):
                return part.view(ids.shape)
        return None

    def search(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """keys [...] -> (index of the fetched row, whether it was fetched)."""
        if not self.keys.numel():
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        found = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
        return found, self.keys[found] == keys


@dataclass(frozen=True)
class Part:
    """Some of a request's rows, and where they travel."""

    mine: Tensor | None  # [sum(send)] positions among this rank's rows, by owner; None: all
    # [sum(receive)] positions among the rows asked of this rank, in rank order; None: all
    theirs: Tensor | None
    send: list[int]  # of `mine`, owned by each rank
    receive: list[int]  # of `theirs`, asked by each rank
    # rows and sums of gradients of `theirs`, if prepared
    summed: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


def parts_of(
    mine: Tensor, send: list[int], theirs: Tensor, receive: list[int], ranks: int
) -> list[Part]:
    """Positions and counts, part after part and within each rank by rank (`collision.divided` gives
    both) -> the parts."""
    sends, receives = (
        [counts[at : at + ranks] for at in range(0, len(counts), ranks)]
        for counts in (send, receive)
    )
    cut = (
        positions.split([sum(part) for part in counts])
        for positions, counts in ((mine, sends), (theirs, receives))
    )
    return [Part(*four) for four in zip(*cut, sends, receives, strict=True)]


@dataclass
class Request:
    index: Index
    whole: Part
    owned: Tensor  # [sum(receive)] local rows asked of this rank, in rank order
    pieces: int = 1  # in which what is not urgent travels
    rows: Tensor | None = None  # [u, width], a leaf of autograd
    early: list[Part] = field(default_factory=list)  # rows that the batch before does not read
    late: Part | None = None  # rows that it does: they collide, and come after its update
    shared: Part | None = None  # rows that the batch after reads too: their gradients go first
    # rows that it does not: their gradients can wait
    rest: list[Part] = field(default_factory=list)

    def take_gradient(self) -> Tensor:
        """Of the rows [u, width]. Gives the rows and their gradient away: their memory is the
        caller's."""
        assert self.rows is not None
        gradient = self.rows.grad if self.rows.grad is not None else torch.zeros_like(self.rows)
        self.rows = None
        return gradient


def require(part: Part | None) -> Part:
    """A part that `Sharded.compare` has set."""
    assert part is not None, "the requests were not compared"
    return part
