"""One thread that sends batches to the model, and the bounded queue before it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Any

from freescale.config import ServeConfig

Compute = Callable[[Sequence[Any]], Sequence[Any]]


class Job:
    """A query that waits for its answer."""

    def __init__(self, query: Any) -> None:
        self.query, self.arrived = query, time.monotonic()
        self.future = asyncio.get_running_loop().create_future()


class Batcher:
    """Collects queries until there are enough, or the first has waited long enough. Its methods are
    called on the event loop.

    Args:
        compute: answers some queries, on the thread.
        config: the sizes.
        note_batch: called with the size of each batch.
    """

    def __init__(
        self,
        compute: Compute,
        config: ServeConfig,
        note_batch: Callable[[int], None],
    ) -> None:
        self._compute, self._config, self._note_batch = compute, config, note_batch
        self._changed, self._waiting = Condition(), deque[Job]()
        self.length, self.draining, self._closed = 0, False, False
        self._thread = Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def has_room(self, count: int = 1) -> bool:
        return not self.draining and self.length + count <= self._config.queue

    async def answer(self, queries: Sequence[Any]) -> list[Any]:
        """Answers queries; there must be room for them."""
        jobs = [Job(query) for query in queries]
        self.length += len(jobs)
        with self._changed:
            idle = not self._waiting
            self._waiting.extend(jobs)
            if idle or len(self._waiting) >= self._config.batch:
                self._changed.notify()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    def drain(self) -> None:
        """Accepts no more queries, and answers those that wait at once."""
        with self._changed:  # also in a signal handler: the lock is reentrant
            self.draining = True
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, when all is answered."""
        self._closed = True
        self.drain()
        self._thread.join()

    def _run(self) -> None:
        while jobs := self._collect():
            answers = self._answer(jobs)
            self._note_batch(len(jobs))
            jobs[0].future.get_loop().call_soon_threadsafe(self._deliver, jobs, answers)

    def _collect(self) -> list[Job]:
        """The next batch; empty at the end."""
        waiting, most = self._waiting, self._config.batch
        with self._changed:
            while not waiting and not self._closed:
                self._changed.wait()
            while waiting and len(waiting) < most and not self.draining:
                left = waiting[0].arrived + self._config.wait / 1000 - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return [waiting.popleft() for _ in range(min(len(waiting), most))]

    def _answer(self, jobs: Sequence[Job]) -> Sequence[Any]:
        try:
            return self._compute([job.query for job in jobs])
        except Exception as error:
            if len(jobs) > 1:  # the others get their answers
                return [answer for job in jobs for answer in self._answer([job])]
            return [error]

    def _deliver(self, jobs: Sequence[Job], answers: Sequence[Any]) -> None:
        self.length -= len(jobs)
        for job, answer in zip(jobs, answers, strict=True):
            if job.future.cancelled():
                continue
            if isinstance(answer, Exception):
                job.future.set_exception(answer)
            else:
                job.future.set_result(answer)
