"""Batches made ahead by processes, in memory that they share with the trainer.

A batch is a pure function of its number: worker w of n makes the batches w, w + n, w + 2n, ... of a
run, packed, in slots of its own. The training process builds tensors that view the slot; when the
last of them is gone and no device copies from it any more, the slot goes back to its worker. With
CUDA all slots are pinned once.

    trainer -> worker   its share; then repeatedly a free slot, or none, and the first batch that
                        is still needed
    worker -> trainer   a batch's number, slot and layout, or the error instead

Workers are forked from a server (freescale.worker_server), a fresh interpreter: scripts need no
main guard. Until they are up, the caller's thread makes the batches: that is slower, but faster
than waiting. Workers end with the connection, however the trainer ends, and the shared memory is
unnamed, so nothing is left behind.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import replace
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

import torch

from freescale.batch import SequenceBatch
from freescale.batch_codec import build_empty_batch
from freescale.data.batches.worker_process import Arena, BatchSource, FinishedBatch, make_file
from freescale.packed import Packed
from freescale.transport.threads import use_one_core
from freescale.worker_server import WorkerServer

T = TypeVar("T")
_IN_FLIGHT = 6  # batches in flight in a schedule, about
_HEADROOM = 4  # slot size, as a multiple of the first batch
_LEAST_BYTES = 1 << 20  # of a slot


def read_ahead(
    source: BatchSource, workers: int, pin: bool, server: WorkerServer | None = None
) -> AbstractContextManager[Iterator[SequenceBatch]]:
    """The batches of a source, made ahead by workers; with none, by a thread."""
    if workers:
        return WorkerLoader(source, workers, pin, server)
    numbers = range(source.start, source.stop)
    return closing(prefetch(source.batch(number) for number in numbers))


class WorkerLoader:
    """Iterator over the batches [start, stop) of a source, equal to those that it makes itself.

    A context manager: leaving it ends the workers. Batches that were taken stay valid.

    Args:
        source: Makes a batch from its number; pickled for the workers.
        workers: Processes.
        pin: Whether a GPU will copy the batches.
        server: Forks the workers, for one loader at a time; it stays. None starts one, which ends
            with the loader.

    Raises:
        RuntimeError: A worker has died.
    """

    def __init__(
        self,
        source: BatchSource,
        workers: int,
        pin: bool = False,
        server: WorkerServer | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be 1 or more")
        self._source, self._number = source, source.start
        self._workers: list[_Worker] = []
        self._server: WorkerServer | None = None
        self._lasts = server is not None  # outlives this loader
        self._first: SequenceBatch | None = None
        self.made_here = 0  # batches made before a worker was up
        if source.start >= source.stop:
            return
        self._server = WorkerServer() if server is None else server
        try:
            self._start(workers, pin)
        except BaseException:
            self.close()
            raise

    def _start(self, workers: int, pin: bool) -> None:
        source = self._source
        first = self._first = source.batch(source.start).pack()
        assert first.packed is not None and self._server is not None
        slots = 2 + -(-_IN_FLIGHT // workers)
        arena = Arena(workers * slots, max(_LEAST_BYTES, _HEADROOM * first.packed.numel()))
        if pin:
            arena.pin()
        pickled = pickle.dumps(source)
        with ExitStack() as passed_on:
            file = make_file(len(pickled))
            passed_on.callback(os.close, file)
            with open(file, "wb", closefd=False) as whole:
                whole.write(pickled)
            theirs = []
            for number in range(workers):
                ours, other = socket.socketpair()
                theirs.append(passed_on.enter_context(other))
                own = range(number * slots, (number + 1) * slots)
                self._workers.append(_Worker(number, workers, ours, self._server, arena, own))
            self._server.fork(theirs, [arena.fd, file])

    def __iter__(self) -> Iterator[SequenceBatch]:
        return self

    def __next__(self) -> SequenceBatch:
        if not self._workers or self._number >= self._source.stop:
            raise StopIteration
        worker = self._workers[(self._number - self._source.start) % len(self._workers)]
        batch = worker.pop(self._number)
        if batch is None:
            self.made_here += 1
            batch = self._first
            if batch is None or batch.number != self._number:
                batch = self._source.batch(self._number)
        self._first = None
        self._number += 1
        return batch

    def wait_for_next(self) -> None:
        """Waits until the worker has made the next batch, if it is running."""
        if self._workers and self._number < self._source.stop:
            index = (self._number - self._source.start) % len(self._workers)
            self._workers[index].wait_for(self._number)

    def wait_until_up(self) -> None:
        """Waits for the workers before the first batch, for callers that count or compare
        batches."""
        for worker in self._workers[: self._source.stop - self._number]:
            worker.wait_until_up()

    def close(self) -> None:
        """Kills the workers."""
        for worker in self._workers:
            worker.close()
        self._workers = []
        server, self._server = self._server, None
        if server is not None:
            server.stop() if self._lasts else server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lease:
    """A slot while tensors view it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self._copied: list[torch.cuda.Event] = []

    def hold(self, copied: torch.cuda.Event) -> None:
        self._copied.append(copied)

    @property
    def is_over(self) -> bool:
        return all(event.query() for event in self._copied)  # type: ignore[no-untyped-call]


class _Worker:
    """One worker, as the trainer sees it."""

    def __init__(
        self,
        number: int,
        workers: int,
        connection: socket.socket,
        server: WorkerServer,
        arena: Arena,
        slots: range,
    ) -> None:
        self._number, self._workers, self._arena = number, workers, arena
        self._server = server
        self._lent = 0  # slots that the worker may fill or has filled
        self._returned: deque[_Lease] = deque()  # by any thread that drops the last tensor
        self._arrived: FinishedBatch | None = None
        self._has_delivered = False
        self._connection: Connection[Any, Any] = Connection(connection.detach())
        self._send((number, workers, arena.slots, arena.slot_bytes))
        for slot in slots:
            self._offer(slot, 0)

    def pop(self, number: int) -> SequenceBatch | None:
        """The batch; None if the worker is not running yet, or skips it."""
        self.wait_for(number)
        if self._arrived is None or self._arrived.number != number:
            # where to begin if it starts now; the message may stay unread for long
            poll = select.poll()  # select() refuses descriptors above 1023
            poll.register(self._connection, select.POLLOUT)
            if poll.poll(0):
                self._send((None, number + self._workers))
            return None
        made, self._arrived = self._arrived, None
        return self._open(made, number + 1)

    def wait_for(self, number: int) -> None:
        """Waits for the batch; returns at once if the worker is not running."""
        self._reclaim(number)
        while self._arrived is None or self._arrived.number < number:
            if self._arrived is not None:
                self._offer(self._arrived.slot, number)
            if not self._has_delivered and not self._connection.poll():
                return
            self._arrived = self._receive()

    def wait_until_up(self) -> None:
        if not self._has_delivered:
            self._arrived = self._receive()

    def _receive(self) -> FinishedBatch:
        """The batch that the worker has made next."""
        try:
            message = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # it may have died while sending
            raise self._explain_death() from None
        if isinstance(message, BaseException):
            raise message
        assert isinstance(message, FinishedBatch)
        self._has_delivered = True
        self._lent -= 1
        return message

    def _open(self, made: FinishedBatch, needed: int) -> SequenceBatch:
        like = _build_like(made.schema)
        if made.spans:
            own = like.sequences
            spans = {name: replace(own[name], span=span) for name, span in made.spans.items()}
            like = replace(like, sequences={**own, **spans})
        view, lease = self._arena.view(made.slot)[: made.layout.size], None
        if made.message is not None:  # too large for a slot
            buffer = torch.frombuffer(bytearray(made.message), dtype=torch.uint8)
            self._offer(made.slot, needed)
        elif self._lent:
            buffer, lease = torch.from_numpy(view), _Lease(made.slot)
            weakref.finalize(view, self._returned.append, lease).atexit = False
        else:  # its last slot: keeping all batches must not stop the worker
            buffer = torch.from_numpy(view).clone()
            self._offer(made.slot, needed)
        packing = Packed(buffer, made.layout, lease, made.bounds)
        return replace(like.with_packing(packing), number=made.number)

    def _reclaim(self, needed: int) -> None:
        for _ in range(len(self._returned)):
            lease = self._returned.popleft()
            if lease.is_over:
                self._offer(lease.slot, needed)
            else:
                self._returned.append(lease)

    def _offer(self, slot: int, needed: int) -> None:
        self._lent += 1
        self._send((slot, needed))

    def _send(self, message: tuple[int | None, ...]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # its last message is still unread
            self._connection.send_bytes(pickle.dumps(message))

    def _explain_death(self) -> RuntimeError:
        status = self._server.find_status(self._number)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return RuntimeError(
            f"data worker {self._number} {how}; is there memory enough? --workers 0 reads the data "
            "in the trainer"
        )

    def close(self) -> None:
        self._connection.close()


_build_like = lru_cache(4)(build_empty_batch)


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yields the items of `iterable`, up to `depth` ahead of the consumer.

    The iterable runs in a background thread. Its exceptions are raised here. If the consumer stops
    early (break, close, an exception), the thread ends before this generator does.

    Args:
        iterable: the iterable to run ahead, for example a `Histories`.
        depth: maximum number of items that wait for the consumer.

    Raises:
        ValueError: if `depth` is below 1.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; it must be 1 or more")
    return _consume(iterable, depth)


def _consume(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    # One entry per item that may still be produced. A semaphore would do, but SimpleQueue is
    # written in C and wakes its reader without running Python code.
    slots: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(depth):
        slots.put(None)
    stopped = threading.Event()

    def produce() -> None:
        try:
            use_one_core()
            source = iter(iterable)
            try:
                while True:
                    slots.get()
                    if stopped.is_set():
                        return
                    try:
                        item = next(source)
                    except StopIteration:
                        break
                    items.put(("item", item))
            finally:
                close = getattr(source, "close", None)
                if close is not None:
                    close()
            items.put(("end", None))
        except BaseException as error:
            items.put(("error", error))

    thread = threading.Thread(target=produce, name="freescale-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = items.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            slots.put(None)
            yield value
    finally:
        stopped.set()
        slots.put(None)
        thread.join()
