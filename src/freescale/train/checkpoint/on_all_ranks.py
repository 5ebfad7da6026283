"""Work that fails on all ranks with the same words if it fails on one."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from freescale.transport.api import Transport

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)


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


@contextmanager
def explain_errors(failure: str) -> Iterator[None]:
    """Around torch's save and load: a failure on any rank is one line on all. Torch's warning about
    a single process is suppressed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ValueError(f"{failure}: {describe_error(first)}") from error


class CheckpointWriter(FileSystemWriter):
    """torch's writer, with the system's error in its exceptions: other ranks receive the words of
    an exception, not its causes."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        return self._explain(super().write_data, *args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._explain(super().finish, *args, **kwargs)

    def _explain(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            raise ValueError(describe_error(error)) from error


def describe_error(error: BaseException) -> str:
    """One line. A full disk is found behind whatever torch's writer makes of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return "the disk is full: make room, or keep fewer checkpoints"
        cause = cause.__cause__ or cause.__context__
    return " ".join(f"{error}".split()) or type(error).__name__
