"""Where a run takes its batches from, and where it returns those that it did not train."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from freescale.batch import SequenceBatch, check_is_batch


class BatchSource:
    """One iterator. Schedules take batches ahead of time and give back those that were not trained,
    for the next run over the same iterator."""

    def __init__(self, iterator: Iterator[SequenceBatch]) -> None:
        self.iterator = iterator
        self._returned: deque[SequenceBatch] = deque()
        self._open = True

    @property
    def is_lasting(self) -> bool:
        """Whether batches stay valid when the next one is taken: an attribute of the iterator.
        Other iterators may reuse the buffers."""
        return getattr(self.iterator, "is_lasting", False)

    def wait_for_next(self) -> None:
        """Waits until the next batch is ready, if the iterator can tell; otherwise `take` waits."""
        wait = getattr(self.iterator, "wait_for_next", None)
        if wait is not None and self._open and not self._returned:
            wait()

    def take(self) -> SequenceBatch | None:
        """None once the data has ended or `close` was called. After an error too: an iterator that
        failed is not read again."""
        if not self._open:
            return None
        if self._returned:
            return self._returned.popleft()
        try:
            batch = next(self.iterator, None)
        except BaseException:
            self._open = False
            raise
        self._open = batch is not None
        return None if batch is None else check_is_batch(batch)

    def close(self) -> None:
        """This run takes no more."""
        self._open = False

    def give_back(self, batches: Iterable[SequenceBatch]) -> None:
        """In the order in which they were taken."""
        self._returned.extendleft(reversed(list(batches)))

    def reopen(self) -> None:
        """For another run."""
        self._open = True
