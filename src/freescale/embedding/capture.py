"""A copy of the tables' rows, to be made at the moment when they are exactly those of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Capture:
    """Made by whichever thread has the rows in that state; others wait for it. An error is theirs:
    training goes on without the copy."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy
        self._made = threading.Event()
        self._error: BaseException | None = None

    def make(self) -> None:
        """On the caller's thread and stream."""
        try:
            self._copy()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._made.set()

    def fail(self, error: BaseException) -> None:
        """It will not be made, unless it is."""
        if not self._made.is_set():
            self._error = error
            self._made.set()

    def wait(self) -> None:
        """Until it is made, on the host; on a device its stream may still be at it."""
        self._made.wait()
        if self._error is not None:
            raise self._error
