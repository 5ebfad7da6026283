"""A failure on one rank ends the work of all ranks, with its words."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import TypeVar

from freescale.transport.api import Transport

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)


class RemoteError(RuntimeError):
    """Another rank failed or left the loop; this one stops with it."""


def find_first_error(error: Exception | None, transport: Transport) -> Exception | None:
    """What this rank has to raise. A collective.

    Args:
        error: this rank's own failure; None if it has none.
        transport: over all ranks.

    Returns:
        This rank's own error; otherwise a `RemoteError` with the words of the first rank that
        failed; None if no rank failed.
    """
    message = f"{type(error).__name__}: {error}" if error is not None else ""
    messages = transport.gather_bytes(message.encode())
    if error is not None:
        return error
    for rank, text in enumerate(messages):
        if text:
            return RemoteError(f"rank {rank} stopped: {text.decode()}")
    return None


def raise_together(error: Exception | None, transport: Transport) -> None:
    """Raises on all ranks if one of them failed. A collective."""
    found = find_first_error(error, transport)
    if found is not None:
        raise found


def run_on_all_ranks(transport: Transport, work: Callable[[], T], *kinds: type[ValueError]) -> T:
    """Runs `work` on every rank and returns its result on this one. A collective.

    Raises:
        ValueError: on all ranks, if `work` raises OSError or ValueError on any; of the same class
            if that is one of `kinds`.
    """
    problem: list[str] | None = None
    try:
        result = work()
    except (OSError, ValueError) as error:
        problem = [type(error).__name__, describe_error(error)]
    for said in map(json.loads, transport.gather_bytes(json.dumps(problem).encode())):
        if said is not None:
            name, text = said
            raise next((kind for kind in kinds if kind.__name__ == name), ValueError)(text)
    return result


def run_on_rank_0(
    transport: Transport, work: Callable[[], object], failure: str | None = None
) -> None:
    """Runs `work` on rank 0; if it fails, all ranks say so, and what of it: the `failure`. A
    collective."""

    def run() -> None:
        try:
            if transport.rank == 0:
                work()
        except OSError as error:
            prefix = f"{failure}: " if failure else ""
            raise ValueError(f"{prefix}{describe_error(error)}") from error

    run_on_all_ranks(transport, run)


def describe_error(error: BaseException) -> str:
    """One line. A full disk is found behind whatever torch's writer makes of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return "the disk is full: make room, or keep fewer checkpoints"
        cause = cause.__cause__ or cause.__context__
    return " ".join(f"{error}".split()) or type(error).__name__
