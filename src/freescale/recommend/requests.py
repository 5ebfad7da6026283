"""What recommendations are made from, and the batches that a model reads of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.data.ranges import list_ranges
from freescale.recommend.inputs import Past

_CPU_EVENTS, _GPU_EVENTS = 1 << 14, 1 << 18  # events that are encoded at a time


@dataclass(frozen=True)
class Requests:
    """What recommendations are made from."""

    past: Past
    of_users: Tensor | None = None  # [users, places] rows of their features
    of_requests: Tensor | None = None  # [users, places] rows of the context
    users: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.past)

    @staticmethod
    def concat(parts: Sequence[Requests]) -> Requests:
        """Requests to one model as one, without the users' ids."""
        of_users = [part.of_users for part in parts if part.of_users is not None]
        context = [part.of_requests for part in parts if part.of_requests is not None]
        return Requests(
            Past.concat([part.past for part in parts]),
            torch.cat(of_users) if of_users else None,
            torch.cat(context) if context else None,
        )


def split_requests(
    requests: Requests, max_length: int, device: torch.device, more: Sequence[int] | None = None
) -> Iterator[tuple[int, int]]:
    """Ranges of users whose events, and `more` tokens of each, are encoded at a time."""
    most = _CPU_EVENTS if device.type == "cpu" else _GPU_EVENTS
    tokens = np.minimum(requests.past.lengths, max_length) + 1
    total = np.cumsum(tokens if more is None else tokens + np.asarray(more, np.int64))
    first, done = 0, 0
    while first < len(requests):
        last = max(first + 1, int(np.searchsorted(total, done + most, "right")))
        yield first, last
        first, done = last, int(total[last - 1])


def make_batch(requests: Requests, first: int, last: int, max_length: int) -> SequenceBatch:
    """The requests [first, last), each with the last events of its history."""
    past = requests.past
    lengths = np.minimum(past.lengths, max_length)[first:last]
    index = list_ranges(np.cumsum(past.lengths)[first:last] - lengths, lengths)
    counts = torch.from_numpy(lengths)

    def take(column: NDArray[np.int64]) -> Jagged:
        return Jagged(torch.from_numpy(column[index]), counts)

    sequences = {"history": take(past.items)}
    if past.times is not None:
        sequences["timestamps"] = take(past.times)
    if past.actions is not None:
        sequences["actions"] = take(past.actions)
    if past.features is not None:
        sequences["event_features"] = Jagged(past.features[torch.from_numpy(index)], counts)
    dense = {}
    if requests.of_users is not None:
        dense["user_features"] = requests.of_users[first:last]
    if requests.of_requests is not None:
        dense["context_features"] = requests.of_requests[first:last]
    return SequenceBatch(sequences, dense=dense)


def add_candidates(
    batch: SequenceBatch,
    candidates: Sequence[NDArray[np.int64]],
    times: NDArray[np.int64] | None,
) -> SequenceBatch:
    """Adds rows of candidates of each sample; unknown ones stand in as row 0. `times` [samples]:
    when they are offered."""
    rows = np.concatenate([*candidates, np.zeros(0, np.int64)])
    counts = torch.tensor([len(each) for each in candidates], dtype=torch.int64)
    ones = torch.ones(len(rows), dtype=torch.int64)
    offered = Nested(torch.from_numpy(rows.clip(0)), ones, counts)
    sequences, dense = dict(batch.sequences), dict(batch.dense)
    if times is not None:
        given = torch.from_numpy(times).repeat_interleave(counts)
        sequences["candidate_timestamps"] = Jagged(given, counts)
    if "context_features" in dense:
        context = dense.pop("context_features").repeat_interleave(counts, 0)
        sequences["context_features"] = Jagged(context, counts)
    return SequenceBatch(sequences, {"candidates": offered}, dense)
