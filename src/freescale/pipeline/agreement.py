"""What the ranks tell each other before a step: who has data, who failed, left or wants to stop,
the global counts that losses are divided by and, for balancing, how long every sample is (its stage
I)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.balance.shuffle import COLUMNS, measure_samples
from freescale.batch import SequenceBatch
from freescale.batch_codec import build_empty_batch, describe_schema
from freescale.transport.api import Handle, Transport
from freescale.transport.failures import RemoteError, find_first_error

Numbers = NDArray[Any]

MAX_TASKS = 16
_EXHAUSTED, _READY, _FAILED, _STOPPING, _LEFT = range(5)
# Columns of what each rank says; behind the weights (float64), a row of COLUMNS for each sample
# that there is room for.
_STATE, _NUMBER, _SAMPLES, _FEATURES, _COMPUTED_STEP, _COMPUTED, _LONGEST, _WEIGHTS = range(8)
_ROWS = _WEIGHTS + MAX_TASKS
_NO_LENGTHS = np.zeros((0, COLUMNS), np.int64)


@dataclass(frozen=True)
class Agreement:
    """The same on every rank."""

    ready: bool  # at least one rank has a batch, and none failed or wants to stop
    counts: dict[str, float]  # global supervised weight per task
    samples: list[int]  # of each rank
    number: int  # of the global batch
    schema: str  # of its features, for ranks that never saw one; empty if there is no such rank
    lengths: Numbers  # [n, COLUMNS] of the global batch, in rank order; empty if not needed
    computed_step: int  # a past step
    computed: Numbers  # [ranks] seconds that each computed in it; 0 where it is not known
    longest: int | None = None  # events of the longest sequence; None: not known
    stopping: bool = False  # a rank wants to: there is no such step
    error: Exception | None = None  # of the data: there is no such step, and all ranks raise it


@dataclass(frozen=True)
class Proposal:
    """What a rank brings to an agreement."""

    batch: SequenceBatch | None  # the next one, on the host; None without data
    error: Exception | None  # what went wrong instead
    like: SequenceBatch  # has the features of earlier batches
    # samples to leave room for, the same on every rank; None: lengths are not needed
    room: int | None = None
    feature: str | None = "history"  # whose lengths they are; None: of all
    # the last step that was measured and its nanoseconds of compute
    computed: tuple[int, int] = (0, 0)
    stopping: bool = False  # this rank wants the run to end
    # the step after which this rank has left the loop: it takes part no more
    left: int | None = None


def agree_alone(batch: SequenceBatch) -> Agreement:
    """On a batch that the only rank has.

    Raises:
        ValueError: the batch has no tasks, or too many.
    """
    error = _refuse_tasks(sorted(batch.weights), batch)
    if error is not None:
        raise error
    return Agreement(
        ready=True,
        counts=_count_weights(batch),
        samples=[len(batch)],
        number=batch.number,
        schema="",
        lengths=_NO_LENGTHS,
        computed_step=0,
        computed=np.zeros(1),
    )


def _refuse_tasks(names: Sequence[str], batch: SequenceBatch | None) -> ValueError | None:
    """What is wrong with the tasks of a batch."""
    if len(names) > MAX_TASKS:
        return ValueError(
            f"{len(names)} tasks ({', '.join(names)}); at most {MAX_TASKS} are supported"
        )
    if batch is not None and not names:
        return ValueError(
            "the batch has no weights: give it the supervised weight of each sample, per task"
        )
    return None


def _count_weights(batch: SequenceBatch) -> dict[str, float]:
    """The supervised weight of a batch on the host, by task in their order."""
    # by numpy, which has less to do for a few numbers
    return {
        name: float(batch.weights[name].double().numpy().sum()) for name in sorted(batch.weights)
    }


def _measure_longest(batch: SequenceBatch) -> int:
    """Events of the longest sequence of any feature."""
    # by numpy, as above; features of one history often share their lengths
    lengths = {id(each): each for each in (s.host_lengths for s in batch.sequences.values())}
    return max((int(each.numpy().max(initial=0)) for each in lengths.values()), default=0)


class PendingAgreement:
    """An agreement under way: one AllGather on the host; no device is waited for. (A second one if
    a rank has more samples than there was room for.)"""

    def __init__(self, proposal: Proposal, transport: Transport) -> None:
        batch, error = proposal.batch, proposal.error
        present = batch if batch is not None else proposal.like
        names = sorted(present.weights)
        error = error or _refuse_tasks(names, batch)
        # Not the proposal itself: its batches would live as long as the agreement.
        self._left, self._number = proposal.left, proposal.like.number
        self._measured, self._transport, self._error = proposal.room is not None, transport, error
        self._names, self._schema, self._room = names, describe_schema(present), proposal.room or 0
        message = np.zeros(_ROWS + self._room * COLUMNS, np.int64)
        message[_FEATURES] = _hash(self._schema)
        message[_COMPUTED_STEP], message[_COMPUTED] = proposal.computed
        self._rows = np.zeros((0, COLUMNS), np.int64)
        if proposal.left is not None:
            message[:_SAMPLES] = _LEFT, proposal.left
        elif error is not None:
            message[_STATE] = _FAILED
        elif proposal.stopping:
            message[_STATE] = _STOPPING
        elif batch is not None:
            message[:_FEATURES] = _READY, batch.number, len(batch)
            weights = message[_WEIGHTS:_ROWS].view(np.float64)
            weights[: len(names)] = list(_count_weights(batch).values())
            message[_LONGEST] = _measure_longest(batch)
            if proposal.room is not None:
                self._rows = measure_samples(batch, proposal.feature)
                sent = self._rows[: self._room]
                message[_ROWS : _ROWS + sent.size] = sent.reshape(-1)
        self._pending = _gather(message, transport)

    def wait(self) -> Agreement:
        """Waits for all ranks.

        Raises:
            RemoteError: another rank has left the loop.
        """
        transport, room = self._transport, self._room
        gathered = self._pending.wait().numpy()
        states = gathered[:, _STATE]
        if states.max() > _READY:
            return self._refuse(gathered)
        ready = states == _READY
        try:
            names, schema = _agree_on_features(
                gathered[:, _FEATURES], ready, self._names, self._schema, transport
            )
        except ValueError as error:  # on every rank
            return self._refuse_step(error=error)
        samples = gathered[:, _SAMPLES].tolist()
        table = gathered[:, _ROWS:].reshape(transport.world, room, COLUMNS)
        if self._measured and max(samples) > room:
            padded = np.zeros((max(samples), COLUMNS), np.int64)
            padded[: len(self._rows)] = self._rows
            table = _gather(padded, transport).wait().numpy()
        totals = np.ascontiguousarray(gathered[:, _WEIGHTS:_ROWS]).view(np.float64).sum(axis=0)
        return Agreement(
            ready=bool(ready.any()),
            counts=dict(zip(names, totals.tolist(), strict=False)),
            samples=samples,
            number=int(gathered[ready, _NUMBER].max()) if ready.any() else self._number,
            schema=schema,
            lengths=np.concatenate([table[rank, :count] for rank, count in enumerate(samples)]),
            computed_step=int(gathered[0, _COMPUTED_STEP]),
            computed=gathered[:, _COMPUTED] / 1e9,
            longest=int(gathered[:, _LONGEST].max()),
        )

    def _refuse(self, gathered: Numbers) -> Agreement:
        """There is no such step: a rank has left, failed or wants to stop."""
        states = gathered[:, _STATE]
        if (states == _LEFT).any():
            if self._left is None:
                gone = int((states == _LEFT).argmax())
                raise RemoteError(
                    f"rank {gone} left the loop at step {gathered[gone, _NUMBER]} and this one "
                    "did not: `pipeline.stop()` on any rank ends it on all"
                )
            return self._refuse_step()
        if (states == _FAILED).any():
            return self._refuse_step(error=find_first_error(self._error, self._transport))
        return self._refuse_step(stopping=True)

    def _refuse_step(self, **why: Any) -> Agreement:
        ranks = self._transport.world
        return Agreement(
            False, {}, [0] * ranks, self._number, "", _NO_LENGTHS, 0, np.zeros(ranks), **why
        )


def _gather(message: Numbers, transport: Transport) -> Handle:
    return transport.all_gather(torch.from_numpy(message), "counts")


def _agree_on_features(
    digests: Numbers, ready: Numbers, names: list[str], schema: str, transport: Transport
) -> tuple[list[str], str]:
    """Checks that all ranks have the same features. Tasks, and the schema if a rank has to learn
    it."""
    agreed = digests[ready]
    if (agreed != agreed[:1]).any():
        columns = [
            f"{name[2:] or 'keys'} ({kind}, {dtype} {shape})"
            for name, kind, dtype, shape in json.loads(schema or "[]")
        ]
        raise ValueError(
            f"ranks have different features or tasks in one step; rank {transport.rank} has "
            f"{', '.join(columns) or 'none yet'}"
        )
    if not agreed.size or (digests == agreed[0]).all():
        return names, ""
    schemas = transport.gather_bytes(schema.encode())
    schema = schemas[int(ready.argmax())].decode()
    return sorted(build_empty_batch(schema).weights), schema


@lru_cache(maxsize=64)
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
