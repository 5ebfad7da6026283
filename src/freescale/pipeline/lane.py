"""A lane: a thread that communicates while the main thread computes, with a channel and, on a GPU,
a stream of its own.

Jobs of a lane run one after another, in the order in which they were submitted; the main thread
submits them in the same order on every rank, so that the collectives of the lane's channel are in
the same order everywhere. Streams follow the host: a job begins after what the submitter had
issued, and whoever waits for a job continues after what it issued.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from freescale.ledger.ledger import ThreadLedger
from freescale.streams import current_stream, record_event
from freescale.transport.api import Transport
from freescale.transport.event_waits import wait_for_event
from freescale.transport.threads import start_thread


class Moment:
    """A point that one thread reaches and others wait for, on the host and on the device.

    A lane waits on the host for the device too: what waits in a stream can hold up streams that
    share its hardware queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reached = threading.Event()
        self._event: torch.cuda.Event | None = None
        self._error: BaseException | None = None

    def reach(self) -> None:
        if self._device.type == "cuda":
            self._event = record_event(blocking=True)  # a core that waits is free for others
        self._reached.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._reached.set()

    @contextmanager
    def reached_by(self) -> Iterator[None]:
        """Reached at the end of the context; fails with its error."""
        try:
            yield
            self.reach()
        except BaseException as error:
            self.fail(error)
            raise

    def wait(self, host: bool = False) -> None:
        """What this thread issues from now on happens after the moment; with `host`, the moment
        has passed on return. Raises the error of `fail`."""
        self._reached.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None and host:
            wait_for_event(self._event)
        elif self._event is not None:
            current_stream(self._device).wait_event(self._event)


class Job(Moment):
    """Reached when its function has returned."""

    def __init__(
        self, device: torch.device, function: Callable[[], None], begin: Moment | None = None
    ) -> None:
        super().__init__(device)
        self.function: Callable[[], None] | None = function
        if begin is None and device.type == "cuda":
            begin = Moment(device)
            begin.reach()
        self.begin = begin  # None: there is no device to wait for


class Lane:
    """Runs jobs one after another, on a thread, a channel and a stream of its own."""

    def __init__(self, name: str, transport: Transport, urgent: bool = False) -> None:
        """Opens a channel: a collective."""
        self.name, self.device = name, transport.device
        self.side = ThreadLedger(transport.ledger, name)
        self._transport, self.transport = transport, transport.channel(self.side, urgent)
        # A higher priority than the compute, whose kernels fill the device: a lane's kernels are
        # many, small, and wait for each other.
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            priority = -2 if urgent else -1
            self.stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self.device, priority=priority
            )
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: list[threading.Thread] = []

    def submit(
        self,
        function: Callable[[], None],
        tensors: Sequence[Tensor] = (),
        begin: Moment | None = None,
    ) -> Job:
        """Queues a job. `tensors`: those of another stream that the function uses; `begin`: an
        moment before this call, if the job does not depend on what was issued since."""
        self.borrow(*tensors)
        job = Job(self.device, function, begin)
        if self._thread is None:
            self._ending = [thread for thread in self._ending if thread.is_alive()]
            self._thread = start_thread(
                self.name, partial(self._work, self._jobs), partial(self._jobs.put, None)
            )
        self._jobs.put(job)
        return job

    def rest(self) -> None:
        """Ends the thread once its jobs are done; the next job starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._ending.append(self._thread)
            self._thread, self._jobs = None, queue.SimpleQueue()

    def close(self) -> None:
        """Gives the channel back: another lane may have it. In the same order on every rank."""
        self.rest()
        for thread in self._ending:
            thread.join()
        self._transport.release(self.transport)

    def borrow(self, *tensors: Tensor | None) -> None:
        """Marks tensors of another stream that this lane's stream uses: their memory is reused
        only after that."""
        if self.stream is not None:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self.stream)

    def lend(self, tensor: Tensor) -> None:
        """Marks a tensor of this lane's stream that the caller's stream uses."""
        if self.stream is not None:
            tensor.record_stream(current_stream(self.device))

    def _work(self, jobs: queue.SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            self._run(job)

    def _run(self, job: Job) -> None:
        try:
            # The stream brings its device along, which a new thread does not know.
            stream = torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()
            with torch.no_grad(), stream:
                if job.begin is not None:
                    job.begin.wait(host=True)
                function, job.function = job.function, None  # what it holds is free once it has run
                assert function is not None
                function()
                job.reach()
        except BaseException as error:  # noqa: BLE001 - raised where the job is waited for
            job.fail(error)
