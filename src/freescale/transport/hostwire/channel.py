"""A channel of hostwire: transfers in one order, the same on every rank. Two threads carry them,
one out and one in. Where a wire allows it, who waits for a transfer carries it instead, both halves
in turn: to wake a thread takes longer than many a transfer."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from freescale.transport.hostwire.gate import Gate
from freescale.transport.hostwire.pinned import Pinned
from freescale.transport.hostwire.steps import Ready, TransferSteps
from freescale.transport.hostwire.transfer import Transfer
from freescale.transport.hostwire.wires.gloo import Wire
from freescale.transport.threads import start_thread

# seconds that who carries looks around before it sleeps; a CPU has other things to do
_AWAKE = {"cpu": 0.0, "cuda": 0.0005}
_NAP = 0.00005  # seconds


class Channel:
    def __init__(
        self,
        name: str,
        rank: int,
        device: torch.device,
        routes: Sequence[Wire],
        ring: Pinned,
        gate: Gate,
        piece: int,
        seconds: float,
        patient: bool = False,
    ) -> None:
        """`routes`: the wire to each rank. `ring`: SLOTS slots, which the wires can send from.
        `piece`: the largest, in bytes. `patient`: who submits waits soon, and does nothing else
        meanwhile."""
        self.name, self._seconds = name, seconds
        self._halves = TransferSteps(rank, device, routes, ring, gate, piece, seconds)
        # sends return at once: what is sent is a copy, in a slot
        prompt = all(not wire.direct for wire in routes)
        self._at_once = prompt and device.type == "cpu"
        self._carried = CallerDriven(self._halves, seconds) if patient and prompt else None
        self._sending = threading.Lock()
        self._counting, self._waiting = threading.Lock(), 0  # transfers that the thread has to send
        self._queues: list[queue.SimpleQueue[Transfer | None]] = [
            queue.SimpleQueue(),
            queue.SimpleQueue(),
        ]
        self._threads: list[threading.Thread] = []

    def submit(self, transfer: Transfer) -> None:
        if self._halves.error is not None:
            transfer.half_done(self._halves.error)
        elif self._carried is not None:
            self._carried.add(transfer)
        else:
            self._start_threads()
            self._queues[1].put(transfer)
            if self._at_once and self._sent_at_once(transfer):
                return
            with self._counting:
                self._waiting += 1
            self._queues[0].put(transfer)

    def close(self) -> bool:
        """Ends the threads once what was submitted is done; the wires are whoever's who opened
        them."""
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._threads = []
        self._halves.close()
        return True

    def _start_threads(self) -> None:
        if not self._threads:
            for half, (way, work) in enumerate(
                (("out", self._halves.out), ("in", self._halves.into))
            ):
                end = partial(self._queues[half].put, None)
                self._threads.append(
                    start_thread(f"{self.name} {way}", partial(self._work, half, work), end)
                )

    def _work(self, half: int, work: Callable[[Transfer], Iterator[Ready]]) -> None:
        waiting = self._queues[half]
        while (transfer := waiting.get()) is not None:
            if half:
                self._half(transfer, work)
                if waiting.empty():
                    _all(self._halves.settle())
            else:
                with self._sending:
                    self._half(transfer, work)
                with self._counting:
                    self._waiting -= 1
            transfer = None

    def _sent_at_once(self, transfer: Transfer) -> bool:
        """Sends it here and now, if nothing is before it and there are slots for all of it: no rank
        may wait for another with what that one waits for still in its hands."""
        if len(transfer.out) > 1 or not self._sending.acquire(blocking=False):
            return False
        try:
            if self._waiting or not self._halves.has_slots(transfer):
                return False
            self._half(transfer, self._halves.out)
            return True
        finally:
            self._sending.release()

    def _half(self, transfer: Transfer, work: Callable[[Transfer], Iterator[Ready]]) -> None:
        try:
            with torch.no_grad():
                if self._halves.error is None:
                    _all(work(transfer))
        except BaseException as error:  # noqa: BLE001 - raised where the transfer is waited for
            self._halves.fail(error)
        transfer.half_done(self._halves.error)


class CallerDriven:
    """Transfers that whoever waits for one carries, up to that one: out and in by turns, whichever
    can go on."""

    def __init__(self, halves: TransferSteps, seconds: float) -> None:
        self._halves, self._seconds, self._awake = halves, seconds, _AWAKE[halves.device.type]
        self._ways = (_Way(halves.out), _Way(halves.into))

    def add(self, transfer: Transfer) -> None:
        transfer.carry = self.until
        for way in self._ways:
            way.waiting.append(transfer)
        with torch.no_grad():
            while self._on(self._ways[0]):
                pass

    def until(self, last: Transfer) -> None:
        since = time.perf_counter()
        with torch.no_grad():
            while not last.done:
                if any([self._on(way) for way in self._ways]):
                    since = time.perf_counter()
                    continue
                waited = time.perf_counter() - since
                if waited > self._seconds:
                    self._halves.late = True  # the next step raises
                elif waited > self._awake and not self._ways[0].waiting:
                    self._on(self._ways[1], wait=True)
                elif waited > self._awake:
                    time.sleep(_NAP)

    def _on(self, way: _Way, wait: bool = False) -> bool:
        """Goes on with the first transfer of a way, as far as the next step that may have to wait.
        Whether it could. With `wait` it waits first."""
        halves = self._halves
        if not way.waiting:
            return False
        if halves.error is None:
            try:
                if way.step(wait or halves.late):
                    return True
                if way.steps is not None:
                    return False
            except BaseException as error:  # noqa: BLE001 - raised where the transfer is waited for
                halves.fail(error)
        way.steps = way.ready = None
        way.waiting.popleft().half_done(halves.error)
        return True


class _Way:
    def __init__(self, work: Callable[[Transfer], Iterator[Ready]]) -> None:
        self.waiting: deque[Transfer] = deque()
        self.steps: Iterator[Ready] | None = None  # of the first
        self.ready: Ready | None = None
        self._work = work

    def step(self, anyway: bool) -> bool:
        """Whether there was one and it could be made; `steps` is None after the last. With `anyway`
        it may wait."""
        if self.steps is None:
            self.steps = self._work(self.waiting[0])
        if self.ready is not None and not anyway and not _is(self.ready):
            return False
        self.ready = next(self.steps, None)
        if self.ready is None:
            self.steps = None
            return False
        return True


def _is(ready: Ready) -> bool:
    try:
        return ready()
    except (OSError, ValueError):  # a closed socket: the wait that follows says what happened
        return True


def _all(steps: Iterator[Ready]) -> None:
    for _ in steps:
        pass
