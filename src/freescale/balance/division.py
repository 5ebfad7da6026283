"""Divides histories that cost more than a rank's share into parts, which several ranks compute.

A part is a run of a history's events: its queries see the events of earlier parts too, so the part
[start, stop) costs quadratic * (stop^2 - start^2) + linear * (stop - start), and parts of equal
cost get shorter towards the end. Candidates belong to the last part. All is a pure function of
gathered numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.balance.cost import CostModel, square
from freescale.batch import Jagged, Nested, Parts, SequenceBatch
from freescale.visible import Visible

Numbers = NDArray[np.int64]

# `auto`: cost of a history, in shares of a rank, from which dividing it pays
_WORTH = 1.25
_SHORTEST = 256  # `auto`: events of a part
_GRAIN = 128  # long parts are cut at multiples of the kernels' tiles
_OF_CANDIDATES = ("labels", "candidate_timestamps", "context_features")


@dataclass(frozen=True)
class Division:
    """The pieces of a global batch, in the order of its samples: parts of divided histories, and
    whole samples."""

    sample: Numbers  # [pieces]
    start: Numbers  # [pieces] events before the piece
    stop: Numbers  # [pieces]

    @property
    def is_last(self) -> NDArray[np.bool_]:
        """[pieces]: whether the piece is the last, or all, of its sample."""
        return np.append(self.sample[1:] != self.sample[:-1], True)

    @property
    def is_part(self) -> NDArray[np.bool_]:
        """[pieces]: whether it is one of several."""
        return ~self.is_last | (self.start > 0)

    def measure(
        self, table: NDArray[Any], visible: Visible | None = None
    ) -> tuple[NDArray[Any], Numbers]:
        """[pieces, 4] features of the cost, which add up to those of `CostModel.measure`, but for
        the constant; and [pieces] tokens. table [n, 3] as of `Balancer.plan`."""
        start, stop = self.start.astype(np.float64), self.stop.astype(np.float64)
        candidates = np.where(self.is_last, table[self.sample, 1], 0).astype(np.float64)
        squares = square(stop, visible) - square(start, visible)
        rows = [squares, stop - start, candidates, np.ones_like(start)]
        further = np.where(self.is_last, (table[:, 2] - table[:, 0])[self.sample], 0)
        return np.stack(rows, 1), self.stop - self.start + further

    def route(self, rank_of: NDArray[Any], rank: int, ranks: int) -> Parts:
        """What `rank` has and exchanges, if the pieces are at the ranks `rank_of` [pieces]."""
        pieces = np.flatnonzero(self.is_part).tolist()
        mine = [piece for piece in pieces if rank_of[piece] == rank]
        events = (self.stop - self.start).tolist()
        of_sample = {n: [p for p in pieces if self.sample[p] == n] for n in self.sample[pieces]}

        def find_reader(piece: int, reader: int) -> int | None:
            """The first later part of the same history on a rank."""
            parts = of_sample[self.sample[piece]]
            return next((n for n in parts if n > piece and rank_of[n] == reader), None)

        sent, send, receive = [], [0] * ranks, [0] * ranks
        arrived: dict[int, tuple[int, int]] = {}  # range of the received rows, by piece
        for peer in range(ranks):
            for piece in pieces:
                reader = find_reader(piece, peer)
                if rank_of[piece] == rank and reader is not None:
                    sent.append((mine.index(piece), reader))
                    send[peer] += events[piece]
                if rank_of[piece] == peer and find_reader(piece, rank) is not None:
                    arrived[piece] = sum(receive), sum(receive) + events[piece]
                    receive[peer] += events[piece]
        histories = [of_sample[self.sample[piece]] for piece in mine]
        earlier = [
            tuple(arrived[n] for n in history if n < piece)
            for piece, history in zip(mine, histories, strict=True)
        ]
        starts = [int(self.start[piece]) for piece in mine]
        wholes = [int(self.stop[history[-1]]) for history in histories]
        sizes = [events[piece] for piece in mine]
        return Parts(starts, sizes, wholes, sent, send, receive, earlier)


def divide(
    table: NDArray[Any], cost: CostModel, ranks: int, split: str | int, least_gain: float = 0.0
) -> Division | None:
    """Divides the samples that cost more than a rank's share; None if there are none.

    Args:
        table: [n, 3] as of `Balancer.plan`: events, candidates, tokens.
        cost: Of a sample.
        ranks: That share the batch.
        split: Number of parts, or `auto`: as many as a rank's share goes into the sample, for
            samples that clearly exceed it and parts that are not too short.
        least_gain: How much a sample has to cost beyond a rank's share.
    """
    events = table[:, 0].astype(np.int64)
    costs = cost(events, table[:, 1])
    share = float(costs.sum()) / ranks
    if not share:
        return None
    if split == "auto":
        wanted = np.minimum(np.ceil(costs / share), ranks).astype(np.int64)
        count = np.where(costs > _WORTH * share, np.minimum(wanted, events // _SHORTEST), 1)
    else:
        count = np.where(costs > share, np.minimum(int(split), events), 1)
    count = np.where(costs - share >= least_gain, np.maximum(count, 1), 1)
    if count.max() < 2:
        return None
    sample = np.repeat(np.arange(len(table)), count)
    start, stop = np.zeros(len(sample), np.int64), events[sample]
    first = np.cumsum(count) - count
    for number in np.flatnonzero(count > 1).tolist():
        edges = _cut(int(events[number]), int(count[number]), cost, float(table[number, 1]))
        pieces = slice(first[number], first[number] + count[number])
        start[pieces], stop[pieces] = edges[:-1], edges[1:]
    return Division(sample, start, stop)


def _cut(events: int, count: int, cost: CostModel, candidates: float) -> Numbers:
    """[count + 1] edges between parts of about equal cost, each with an event."""
    factor, line = cost.quadratic, cost.linear
    if not factor and not line:
        line = 1.0
    whole = float(square(np.array(float(events)), cost.visible))
    total = factor * whole + line * events + cost.candidate * candidates
    goals = total * np.arange(1, count) / count
    # the root of factor * x^2 + line * x = goal, in a form that also holds without squares
    root = 2 * goals / (line + np.sqrt(line * line + 4 * factor * goals))
    if cost.visible is not None:
        each = np.arange(events + 1.0)
        costs = factor * square(each, cost.visible) + line * each
        root = np.searchsorted(costs, goals).astype(np.float64)
    grain = _GRAIN if events >= 4 * _GRAIN * count else 1
    inner = np.rint(root / grain).astype(np.int64) * grain
    steps = np.arange(1, count)
    inner = np.maximum.accumulate(inner - steps) + steps  # each part has an event
    inner = np.clip(inner, steps, events - count + steps)
    return np.concatenate([[0], inner, [events]])


def cut_samples(
    batch: SequenceBatch, sample: Numbers, events: Numbers, feature: str
) -> SequenceBatch:
    """Cuts the samples of a host batch into pieces: sample [pieces], ascending, events [pieces] of
    the sequence `feature`, like which those of the same lengths are cut.

    Values keep their places: only lengths change. Columns per sample are repeated; what belongs to
    the candidates goes to the last piece.
    """
    index, sizes = torch.from_numpy(sample), torch.from_numpy(events)
    is_last = torch.from_numpy(np.append(sample[1:] != sample[:-1], True)[: len(sample)])
    several = torch.bincount(index, minlength=len(batch)) > 1  # [samples]
    history = batch.sequences[feature].lengths

    def cut(name: str, part: Jagged | Nested | Tensor) -> Jagged | Nested | Tensor:
        if isinstance(part, Tensor):
            return part[index]
        if isinstance(part, Nested):
            return Nested(part.values, part.lengths, part.counts[index] * is_last)
        if batch.candidates and name in _OF_CANDIDATES:
            return Jagged(part.values, part.lengths[index] * is_last)
        if not torch.equal(part.lengths[several], history[several]):
            raise ValueError(
                f"sequence {name!r} has other lengths than {feature!r} in a history that is "
                "divided: leave out split_histories"
            )
        return Jagged(part.values, torch.where(several[index], sizes, part.lengths[index]))

    parts = {name: cut(name[2:], part) for name, part in batch.parts().items()}
    return batch.with_parts(parts)


def order_parts(
    batch: SequenceBatch, division: Division, rank_of: NDArray[Any], rank: int, ranks: int
) -> SequenceBatch:
    """A rank's pieces, in global order, with the parts moved to the front and described."""
    own = division.is_part[np.flatnonzero(rank_of == rank)]
    order = np.argsort(~own, kind="stable")
    if (order[1:] < order[:-1]).any():
        batch = batch.select(torch.from_numpy(order))
    return replace(batch, divided=division.route(rank_of, rank, ranks))
