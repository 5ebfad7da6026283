"""The schedule that has the tables: what it has deferred is applied, and what it has decided ahead
is rolled back, before others read or replace the rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from freescale.embedding.storage.api import Storage


class Capture:
    """A copy of the tables' rows, to be made by whichever thread has them exactly as after a step.
    Others wait for it. An error is theirs: training goes on without the copy."""

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
        """Unless it is made already, it will not be."""
        if not self._made.is_set():
            self._error = error
            self._made.set()

    def wait(self) -> None:
        """Until it is made, on the host; on a device its stream may still be at it."""
        self._made.wait()
        if self._error is not None:
            raise self._error


class Deferring(Protocol):
    """A schedule, as the lease sees it."""

    def flush(self) -> None: ...
    def discard(self) -> None: ...
    def capture(self, capture: Capture) -> None: ...
    def finish_captures(self) -> None: ...


class TableLease:
    """One schedule at a time has the tables."""

    def __init__(self) -> None:
        self.storages: Sequence[Storage] = ()  # storages of the groups, once the tables are placed
        self._schedule: Deferring | None = None  # the last that trained

    def take_over(self, schedule: Deferring) -> Deferring | None:
        """Makes `schedule` the one that trains, and applies what another has deferred. Returns the
        schedule that trained before. A collective."""
        before = self._schedule
        if before is not schedule:
            self.flush()
            self._schedule = schedule
        return before

    def hand_back(self, schedule: Deferring) -> None:
        """Applies what `schedule` has deferred: it trains no more. A collective."""
        if self._schedule is schedule:
            self.flush()
            self._schedule = None

    def flush(self) -> None:
        """Applies deferred gradients and rolls back, to the last step. A collective."""
        if self._schedule is not None:
            self._schedule.flush()
        self.roll_back()

    def roll_back(self) -> None:
        """Takes back what was decided for steps that have not begun."""
        for storage in self.storages:
            storage.roll_back()

    def restore_ahead(self) -> None:
        """Restores what `roll_back` took back."""
        for storage in self.storages:
            storage.restore_ahead()

    def drop_ahead(self) -> None:
        """Forgets batches that were requested ahead and whose step has not begun: they will be
        requested again. Nothing of them may be under way."""
        for storage in self.storages:
            storage.drop_ahead()

    def mark_state(self) -> list[int]:
        """The last step, for `looking_back`."""
        return [storage.begun for storage in self.storages]

    @contextmanager
    def looking_back(self, mark: Sequence[int]) -> Iterator[None]:
        """Inside, there are the rows of the mark, one or two steps ago; nobody updates them."""
        with ExitStack() as stack:
            for storage, begun in zip(self.storages, mark, strict=True):
                stack.enter_context(storage.looking_back(begun))
            yield

    def discard(self) -> None:
        """Forgets deferred gradients and rows fetched ahead: tables are replaced. A collective."""
        if self._schedule is not None:
            self._schedule.discard()

    def capture(self, capture: Capture) -> None:
        """Makes a copy of the rows of sharded tables when they are exactly those of the last step:
        now, or after deferred gradients are applied and before the next step changes a row."""
        if self._schedule is None:
            capture.make()
        else:
            self._schedule.capture(capture)

    def finish_captures(self) -> None:
        """Flushes if a copy of the rows still has to be made and no step has come. A collective."""
        if self._schedule is not None:
            self._schedule.finish_captures()
