"""Errors of torch's checkpoints, in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from freescale.transport.failures import describe_error

T = TypeVar("T")


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
    """torch's writer, with the system's error in its exceptions: other ranks receive the message of
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
