"""Executes an assignment: the samples of one global batch change ranks, in three stages that a
pipeline hides behind a step.

    I    AllGather  of each sample's length, number of candidates and tokens, and of how long each
                    rank computed in a past step: in the message by which the ranks agree on the
                    step (pipeline/agreement.py); all run the same partitioner
    II   AllToAll   of the sizes of what will be sent, with a digest of the assignment
    III  AllToAll   of the samples, whole: histories, two-level candidates, side features, labels,
                    keys

A stage is issued at one point of the previous step and waited for at the next; the last one when
the batch is needed. Planning, packing and all stages happen on the host, where the batch comes
from: no device is waited for. Candidate lengths travel with their samples: planning needs their sum
alone, which is in stage I.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.balance.balancer import Balancer
from freescale.balance.division import cut_samples, order_parts
from freescale.balance.problem import Assignment
from freescale.batch import SequenceBatch
from freescale.batch_codec import pack, unpack
from freescale.transport.api import Transport

COLUMNS = 3  # columns of stage I: length of the feature, candidates, tokens


class Shuffle:
    """One batch on its way. All ranks call `send_sizes`, `send_samples`, `finish`, in this order.

    `batch` is on the host. `counts` [ranks]: how many samples each rank has. What fails on one rank
    (a user's partitioner, say) is raised on all of them in `send_samples`.
    """

    def __init__(
        self,
        step: int,
        batch: SequenceBatch,
        counts: list[int],
        balancer: Balancer,
        transport: Transport,
    ) -> None:
        self.assignment: Assignment | None = None
        self._step, self._batch, self._counts = step, batch, counts
        self._balancer, self._transport = balancer, transport
        self._error: Exception | None = None
        self._pending: Any = None
        self._message = torch.zeros(0, dtype=torch.uint8)  # bytes for all ranks
        self._bytes = [0] * transport.world  # bytes for each rank
        self._coming = np.zeros((0, 0), np.int64)  # [ranks, tensors]: sizes of what comes from each

    def send_sizes(self, lengths: np.ndarray) -> None:
        """Plans and packs after stage I; starts stage II. lengths [n, COLUMNS]: all samples, by
        rank."""
        ranks, tensors = self._transport.world, len(self._batch.tensors())
        # to each rank: sizes, bytes, digest, whether this rank could plan
        message = np.zeros((ranks, tensors + 3), np.int64)
        try:
            message[:, -2] = self._plan(lengths)
            self._message, message[:, :tensors], self._bytes = pack(self._batch, *self._order())
            message[:, -3], message[:, -1] = self._bytes, 1
        except Exception as error:  # noqa: BLE001 - raised on all ranks, in send_samples()
            self._error = error
        ones = [1] * ranks
        self._pending = self._transport.all_to_all(torch.from_numpy(message), ones, ones, "samples")

    def send_samples(self) -> None:
        """Waits for stage II; stage III starts."""
        message = self._pending.wait().numpy()
        if self._error is not None:
            raise self._error
        name = self.assignment.partitioner if self.assignment is not None else "?"
        failed = np.flatnonzero(message[:, -1] == 0)
        if failed.size:
            raise ValueError(f"partitioner {name!r} failed on rank {failed[0]}: see its message")
        if (message[:, -2] != message[0, -2]).any():
            raise ValueError(
                f"partitioner {name!r} decided differently on different ranks: it "
                "must depend on its argument alone"
            )
        self._coming = message[:, :-3]
        # From host to host: samples and sizes are needed there, and no SM has to move them.
        self._pending = self._transport.all_to_all(
            self._message, self._bytes, message[:, -3].tolist(), "samples"
        )
        del self._message

    def finish(self) -> SequenceBatch:
        """Waits for stage III. Returns this rank's samples on the host, in global order; parts of
        divided histories come first."""
        batch = unpack(self._batch, self._pending.wait(), self._coming)
        assert self.assignment is not None
        if self.assignment.division is None:
            return batch
        rank, ranks = self._transport.rank, self._transport.world
        return order_parts(batch, self.assignment.division, self.assignment.rank_of, rank, ranks)

    def _plan(self, lengths: np.ndarray) -> int:
        """Sets the assignment; returns a digest of it."""
        home = list_homes(self._counts)
        self.assignment = self._balancer.plan(self._step, lengths, home, self._transport.world)
        decided = [self.assignment.rank_of]
        division = self.assignment.division
        if division is not None:
            decided += [division.sample, division.start, division.stop]
            assert self._balancer.feature is not None
            mine = home[division.sample] == self._transport.rank
            sample, events = division.sample[mine], (division.stop - division.start)[mine]
            sample = sample - sum(self._counts[: self._transport.rank])
            self._batch = cut_samples(self._batch, sample, events, self._balancer.feature)
            pieces = np.bincount(home[division.sample], minlength=len(self._counts))
            self._counts = pieces.tolist()
        digest = hashlib.sha256(b"".join(numbers.tobytes() for numbers in decided)).digest()
        return int.from_bytes(digest[:7], "big")

    def _order(self) -> tuple[np.ndarray, list[int]]:
        """This rank's samples by destination, and how many go to each."""
        assert self.assignment is not None
        first = sum(self._counts[: self._transport.rank])
        mine = self.assignment.rank_of[first : first + len(self._batch)]
        return np.argsort(mine, kind="stable"), np.bincount(
            mine, minlength=self._transport.world
        ).tolist()


def list_homes(counts: Sequence[int]) -> np.ndarray:
    """[n]: the rank that holds each sample of a global batch, from the ranks' counts."""
    return np.repeat(np.arange(len(counts)), counts)


def count_events(batch: SequenceBatch, feature: str | None) -> np.ndarray | None:
    """[samples]: length of a sequence feature of a host batch, or number of ids in all of them;
    None if the batch lacks the feature."""
    if feature is not None:
        return batch.sequences[feature].lengths.numpy() if feature in batch.sequences else None
    counted = [each for each in batch.sequences.values() if not each.values.is_floating_point()]
    return sum((each.lengths.numpy() for each in counted), np.zeros(len(batch), np.int64))


def measure_samples(batch: SequenceBatch, feature: str | None) -> np.ndarray:
    """[samples, 3]: length of the feature (`count_events`), candidates, tokens (with candidates'
    values)."""
    table = np.zeros((len(batch), COLUMNS), np.int64)
    events = count_events(batch, feature)
    if events is not None:
        table[:, 0] = table[:, 2] = events
    for nested in batch.candidates.values():
        counts = nested.counts.numpy()
        table[:, 1] += counts
        ends = np.concatenate([[0], np.cumsum(nested.lengths.numpy())])
        last = np.cumsum(counts)
        table[:, 2] += ends[last] - ends[last - counts]
    return table


def copy_to_host(batch: SequenceBatch) -> SequenceBatch:
    """The batch on the host, where planning happens. Waits for the device if it was there."""
    return batch if batch.device.type == "cpu" else batch.map(Tensor.cpu)
