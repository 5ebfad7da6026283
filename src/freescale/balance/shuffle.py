"""Executes an assignment: the samples of one global batch change ranks, in three stages that a pipeline hides behind a step.

    I    AllGather   of each sample's length, number of candidates and tokens; every rank runs the same partitioner
    II   AllToAll    of the sizes of what will be sent, with a digest of the assignment
    III  AllToAll    of the samples, whole: histories, two-level candidates, side features, labels, keys

A stage is issued at one juncture of the step before and waited for at the next; the last one when the batch is needed. Samples
travel in their wire form, all features and dtypes in one AllToAll. Candidate lengths travel with their samples: planning needs
their sum alone, which is in stage I.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.balance.cost import CostModel
from freescale.balance.movement import local
from freescale.balance.partition import Assignment, Partitioner, Problem, assign, greedy
from freescale.batch import SequenceBatch
from freescale.transport.api import Transport

_COLUMNS = 3  # of stage I: length, candidates, tokens


@dataclass(frozen=True)
class Balancer:
    """How batches are balanced. `cap` is the tokens a rank may hold. The partitioners that keep one have a default: mean + largest
    sample, which always can be met."""

    partitioner: Partitioner
    cost: CostModel
    cap: int | None = None
    nodes: np.ndarray | None = None

    def plan(self, lengths: np.ndarray, candidates: np.ndarray, tokens: np.ndarray, home: np.ndarray, ranks: int) -> Assignment:
        """Pure: gathered columns [n] of the global batch -> its assignment."""
        cap = self.cap
        if cap is None and self.partitioner in (greedy, local):
            cap = -(-int(tokens.sum()) // ranks) + int(tokens.max(initial=0))
        return assign(Problem(self.cost(lengths, candidates), tokens, home, ranks, cap, self.nodes), self.partitioner)


class Shuffle:
    """One batch on its way. Call `lengths`, `sizes`, `samples` and `finish`, in this order, on all ranks.

    `counts` [ranks]: how many samples each rank has. What fails on one rank (a user's partitioner, say) is raised on all of them
    in `samples`.
    """

    def __init__(self, batch: SequenceBatch, counts: list[int], balancer: Balancer, transport: Transport) -> None:
        self.assignment: Assignment | None = None
        self._batch, self._counts = batch, counts
        self._balancer, self._transport = balancer, transport
        self._error: Exception | None = None
        self._pending: Any = None
        self._parts: list[Tensor] = []  # what goes to each rank, as bytes
        self._received: list[int] = []  # bytes that come from each rank

    def lengths(self) -> None:
        """Stage I starts."""
        table = torch.zeros(max(self._counts), _COLUMNS, dtype=torch.int64)
        if len(self._batch):
            table[: len(self._batch)] = _measured(self._batch).cpu()
        self._pending = self._transport.all_gather(table.to(self._transport.device), "samples")

    def sizes(self) -> None:
        """Waits for stage I, plans, packs; stage II starts."""
        table = self._pending.wait().cpu().numpy()  # [ranks, most samples, columns]
        digest = 0
        try:
            digest = self._plan(table)
        except Exception as error:  # noqa: BLE001 - raised on all ranks, in samples()
            self._error = error
            self._parts = [torch.zeros(0, dtype=torch.uint8, device=self._transport.device)] * self._transport.world
        ok = 0 if self._error is not None else 1
        message = torch.tensor([[part.numel(), digest, ok] for part in self._parts], device=self._transport.device)
        ones = [1] * self._transport.world
        self._pending = self._transport.all_to_all(message, ones, ones, "samples")

    def samples(self) -> None:
        """Waits for stage II; stage III starts."""
        message = self._pending.wait().cpu()  # [ranks, 3]: bytes to come, digest, whether the rank could plan
        failed = (message[:, 2] == 0).nonzero().flatten().tolist()
        if self._error is not None:
            raise self._error
        name = self.assignment.partitioner if self.assignment is not None else "?"
        if failed:
            raise ValueError(f"partitioner {name!r} failed on rank {failed[0]}: its message says why")
        if message[:, 1].unique().numel() > 1:
            raise ValueError(f"partitioner {name!r} decided differently on different ranks: it must depend on its argument alone")
        receive = message[:, 0].tolist()
        send = [part.numel() for part in self._parts]
        self._received = receive
        self._pending = self._transport.all_to_all(torch.cat(self._parts), send, receive, "samples")
        self._parts = []

    def finish(self) -> SequenceBatch:
        """Waits for stage III; this rank's samples, in the order of the global batch."""
        wires = self._pending.wait().split(self._received)
        parts = [self._batch.from_wire(wire) for wire in wires if wire.numel()]
        return SequenceBatch.concat(parts) if parts else self._batch.slice(0, 0)

    def _plan(self, table: np.ndarray) -> int:
        """Sets the assignment and what goes to each rank; returns a digest of the assignment."""
        ranks = self._transport.world
        held = np.array(self._counts)
        columns = np.concatenate([table[rank, :count] for rank, count in enumerate(held)])  # [n, columns]
        home = np.repeat(np.arange(ranks), held)
        self.assignment = self._balancer.plan(columns[:, 0], columns[:, 1], columns[:, 2], home, ranks)
        mine = self.assignment.rank_of[home == self._transport.rank]
        order = torch.from_numpy(np.argsort(mine, kind="stable")).to(self._batch.device)
        counts = np.bincount(mine, minlength=ranks).tolist()
        empty = torch.zeros(0, dtype=torch.uint8, device=self._transport.device)
        if len(self._batch):
            parts = self._batch.select(order).split(counts)
            self._parts = [part.to_wire() if len(part) else empty for part in parts]
        else:
            self._parts = [empty] * ranks
        return int.from_bytes(hashlib.sha256(self.assignment.rank_of.tobytes()).digest()[:7], "big")


def _measured(batch: SequenceBatch) -> Tensor:
    """[samples, 3]: history length, candidates, tokens (history and all values of the candidates)."""
    zeros = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
    history = batch.sequences["history"].lengths if "history" in batch.sequences else zeros
    counts, tokens = zeros, history
    for nested in batch.candidates.values():
        counts = counts + nested.counts
        ends = torch.cumsum(torch.cat([nested.lengths.new_zeros(1), nested.lengths]), 0)
        offsets = nested.outer.offsets
        tokens = tokens + ends[offsets[1:]] - ends[offsets[:-1]]
    return torch.stack([history, counts, tokens], dim=1)
