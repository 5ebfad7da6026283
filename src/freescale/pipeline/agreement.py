"""What the ranks tell each other before a step: who has data, who failed, and the global counts that losses are divided by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from freescale.batch import SequenceBatch
from freescale.transport.api import Transport

MAX_TASKS = 16
_EXHAUSTED, _READY, _FAILED = 0.0, 1.0, 2.0


class RemoteError(RuntimeError):
    """Another rank failed; this one stops with it."""


@dataclass(frozen=True)
class Agreement:
    """The same on every rank."""

    ready: bool  # at least one rank has a batch
    counts: dict[str, float]  # global supervised weight per task
    samples: list[int]  # of each rank


def agree(
    batch: SequenceBatch | None, error: Exception | None, transport: Transport, like: SequenceBatch | None = None
) -> Agreement:
    """One AllGather of a vector [state, digest of the task names, samples, weights...]. Raises on all ranks if one failed.

    A rank whose data has ended (`batch` None) knows the tasks from a batch that it had before (`like`), if it had any.
    """
    known = batch if batch is not None else like
    names = sorted(known.weights) if known is not None else []
    if error is None and len(names) > MAX_TASKS:
        error = ValueError(f"{len(names)} tasks ({', '.join(names)}); at most {MAX_TASKS} are supported")
    if error is None and batch is not None and not names:
        error = ValueError("the batch has no weights: give it the supervised weight of each sample, per task")
    vector = torch.zeros(3 + MAX_TASKS, dtype=torch.float64)
    if error is not None:
        vector[0] = _FAILED
    elif batch is not None:
        vector[0] = _READY
        vector[1] = int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:6], "big")
        vector[2] = len(batch)
        for position, name in enumerate(names):
            vector[3 + position] = batch.weights[name].double().sum()
    gathered = transport.all_gather(vector.to(transport.device), "counts").wait().cpu()  # [world, 3 + tasks]
    states = gathered[:, 0]
    if bool((states == _FAILED).any()):
        _raise_everywhere(error, transport)
    ready = states == _READY
    digests = gathered[ready, 1].unique()
    if digests.numel() > 1:
        raise ValueError(f"ranks have different tasks in one step; rank {transport.rank} has {', '.join(names)}")
    totals = gathered[:, 3 : 3 + len(names)].sum(dim=0).tolist()
    return Agreement(bool(ready.any()), dict(zip(names, totals, strict=True)), gathered[:, 2].long().tolist())


def _raise_everywhere(error: Exception | None, transport: Transport) -> None:
    message = f"{type(error).__name__}: {error}" if error is not None else ""
    messages = transport.gather_bytes(message.encode())
    if error is not None:
        raise error
    rank, first = next((r, m.decode()) for r, m in enumerate(messages) if m)
    raise RemoteError(f"rank {rank} stopped: {first}")
