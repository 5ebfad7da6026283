"""One thread that owns the model, and the bounded queue before it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Any

from freescale.recommend.serve.schema import Limits

_LOG = logging.getLogger("freescale.serve")


class Job:
    """A query that waits for its answer."""

    def __init__(self, query: Any) -> None:
        self.query, self.future = query, asyncio.get_running_loop().create_future()
        self.arrived = time.monotonic()


class Batcher:
    """Collects queries until there are enough, or the first has waited long enough.

    All methods are called on the event loop.

    Args:
        compute: answers some queries; runs on the thread.
        limits: of batches and the queue.
        note_batch: called with the size of each batch.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Any]], Sequence[Any]],
        limits: Limits,
        note_batch: Callable[[int], None],
    ) -> None:
        self._compute, self._limits, self._note_batch = compute, limits, note_batch
        self._changed, self._waiting = Condition(), deque[Job]()
        self.length, self.draining, self._closed = 0, False, False
        self._thread = Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def has_room(self, count: int = 1) -> bool:
        return not self.draining and self.length + count <= self._limits.queue

    async def answer(self, queries: Sequence[Any]) -> list[Any]:
        """Answers queries; there must be room for them."""
        jobs = [Job(query) for query in queries]
        self.length += len(jobs)
        with self._changed:
            idle = not self._waiting
            self._waiting.extend(jobs)
            if idle or len(self._waiting) >= self._limits.batch:
                self._changed.notify()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    def drain(self) -> None:
        """Accepts no more queries, and answers those that wait at once."""
        self.draining = True
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, when all is answered."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while jobs := self._collect():
            answers = self._answer(jobs)
            self._note_batch(len(jobs))
            jobs[0].future.get_loop().call_soon_threadsafe(self._deliver, jobs, answers)

    def _collect(self) -> list[Job]:
        """The next batch; empty at the end."""
        waiting = self._waiting
        with self._changed:
            while not waiting and not self._closed:
                self._changed.wait()
            while waiting and len(waiting) < self._limits.batch and not self.draining:
                left = waiting[0].arrived + self._limits.wait - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return [waiting.popleft() for _ in range(min(len(waiting), self._limits.batch))]

    def _answer(self, jobs: Sequence[Job]) -> Sequence[Any]:
        try:
            return self._compute([job.query for job in jobs])
        except Exception as error:  # of one query: the others get their answers
            if len(jobs) == 1:
                _LOG.exception("a query failed")
                return [error]
            return [answer for job in jobs for answer in self._answer([job])]

    def _deliver(self, jobs: Sequence[Job], answers: Sequence[Any]) -> None:
        self.length -= len(jobs)
        for job, answer in zip(jobs, answers, strict=True):
            if job.future.cancelled():
                continue
            if isinstance(answer, Exception):
                job.future.set_exception(answer)
            else:
                job.future.set_result(answer)
