"""A failure on one rank raises on all ranks, with the same message."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from freescale.transport.api import Gather, Transport, TransportError, gather_json

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)


class RemoteError(RuntimeError):
    """Another rank failed or left the loop; this one stops with it."""


def find_first_message(message: str, gather: Gather) -> tuple[int, str] | None:
    """The first rank whose message is not empty, and its message. A collective."""
    for rank, text in enumerate(gather(message.encode())):
        if text:
            return rank, text.decode()
    return None


@contextmanager
def needing(failure: str, gather: Gather, *kinds: type[Exception]) -> Iterator[None]:
    """An exception of these kinds inside is a TransportError on all ranks. A collective. `failure`
    has places for the rank and the reason."""
    reason = ""
    try:
        yield
    except kinds as caught:
        reason = str(caught) or type(caught).__name__
    if (failed := find_first_message(reason, gather)) is not None:
        raise TransportError(failure.format(*failed))


def find_first_error(error: Exception | None, transport: Transport) -> Exception | None:
    """Finds what this rank has to raise: its own error, otherwise a `RemoteError` with the message
    of the first rank that failed; None if no rank failed. A collective."""
    message = "" if error is None else f"{type(error).__name__}: {error}"
    failed = find_first_message(message, transport.gather_bytes)
    if error is None and failed is not None:
        return RemoteError("rank {} stopped: {}".format(*failed))
    return error


def raise_together(error: Exception | None, transport: Transport) -> None:
    """Raises on all ranks if one of them failed. A collective."""
    found = find_first_error(error, transport)
    if found is not None:
        raise found


@contextmanager
def failing_together(transport: Transport) -> Iterator[None]:
    """An exception inside raises on all ranks. A collective, at the end of the block."""
    error = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised on all ranks
        error = caught
    raise_together(error, transport)


def raise_in_step(error: Exception | None, transport: Transport, need: int = 0) -> None:
    """Like `raise_together`, but ranks exchange only one number each if none failed. A collective.
    `need`: how much this rank needs, if `error` is a shortage; otherwise 0. The error of the rank
    that needs most is raised on all ranks, as a ValueError."""
    mine = need if need or error is None else -1
    needs = transport.all_gather(torch.tensor([mine]), "counts").wait().view(-1).tolist()
    if not any(needs):
        return
    messages = [part.decode() for part in transport.gather_bytes(str(error or "").encode())]
    most = max(needs)
    if most > 0:
        rank = needs.index(most)
        raise ValueError(f"rank {rank}: {messages[rank]}")
    raise_together(error, transport)


def run_on_all_ranks(transport: Transport, work: Callable[[], T], *kinds: type[ValueError]) -> T:
    """Runs `work` on every rank and returns its result on this one. A collective. OSError or
    ValueError on any rank is raised on all, as a ValueError or the one of `kinds` that it is."""
    problem: list[str] | None = None
    try:
        result = work()
    except (OSError, ValueError) as error:
        problem = [type(error).__name__, describe_error(error)]
    for found in gather_json(transport, problem):
        if found is not None:
            name, text = found
            raise next((kind for kind in kinds if kind.__name__ == name), ValueError)(text)
    return result


def run_on_rank_0(
    transport: Transport, work: Callable[[], object], failure: str | None = None
) -> None:
    """Runs `work` on rank 0. If it raises OSError or ValueError, all ranks raise a ValueError;
    after an OSError its message begins with `failure`. A collective."""

    def run() -> None:
        try:
            if transport.rank == 0:
                work()
        except OSError as error:
            prefix = f"{failure}: " if failure else ""
            raise ValueError(f"{prefix}{describe_error(error)}") from error

    run_on_all_ranks(transport, run)


def describe_error(error: BaseException) -> str:
    """An error in one line. A full disk is recognised even if torch has wrapped the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return "the disk is full: make room, or keep fewer checkpoints"
        cause = cause.__cause__ or cause.__context__
    return " ".join(f"{error}".split()) or type(error).__name__
