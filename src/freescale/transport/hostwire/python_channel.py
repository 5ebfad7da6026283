"""A channel of hostwire that Python drives. Two threads carry its transfers, one sends and one
receives. Where the wires allow it, the thread that waits for a transfer drives it instead, both
directions in turn: to wake a thread takes longer than many a transfer."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from freescale.packed import view_bytes
from freescale.transport.api import Sizes
from freescale.transport.hostwire.gate import Gate
from freescale.transport.hostwire.steps import ChannelParts, Ready, TransferSteps
from freescale.transport.hostwire.transfer import Block, Round, Transfer
from freescale.transport.hostwire.wires.api import PieceWire
from freescale.transport.threads import start_thread

# seconds that a thread polls before it sleeps; a CPU has other things to do
_SPIN = {"cpu": 0.0, "cuda": 0.0005}
_NAP = 0.00005  # seconds
_RING = 256 << 10  # bytes that every rank sends: below, an AllGather goes pair by pair
_SEND, _RECEIVE = 0, 1


class PythonChannel:
    """A `Channel` that Python drives, on threads with this name. routes [world]: the wire to each
    rank; empty for a single rank. The channels of a rank share a gate. `caller_drives`: the thread
    that submits waits soon, and does nothing else meanwhile."""

    def __init__(
        self,
        name: str,
        parts: ChannelParts,
        routes: Sequence[PieceWire],
        gate: Gate,
        caller_drives: bool = False,
    ) -> None:
        self.name, self.rank, self.world = name, parts.rank, max(1, len(routes))
        self._steps = TransferSteps(parts, routes, gate)
        # All ranks share memory. Sends return at once: what is sent is a copy, in a slot.
        self._by_memory = all(not wire.direct for wire in routes)
        self._sends_at_once = self._by_memory and parts.device.type == "cpu"
        self._caller_driven = (
            CallerDriven(self._steps, parts.seconds) if caller_drives and self._by_memory else None
        )
        self._sending = threading.Lock()
        self._counting, self._unsent = threading.Lock(), 0  # transfers that the thread has to send
        self._queues: list[queue.SimpleQueue[Transfer | None]] = [
            queue.SimpleQueue(),
            queue.SimpleQueue(),
        ]
        self._threads: list[threading.Thread] = []

    def all_to_all(
        self, kind: str, urgent: bool, tensor: Tensor, send: Sizes, output: Tensor, receive: Sizes
    ) -> Transfer:
        sent, received = _split_bytes(tensor, send), _split_bytes(output, receive)
        if send[self.rank]:
            received[self.rank].copy_(sent[self.rank])
        out = [Round([Block(peer, sent[peer]) for peer in self._ranks_after()])]
        into = [Round([Block(peer, received[peer]) for peer in self._ranks_before()])]
        return self.submit(Transfer(kind, out, into, urgent, output.device))

    def all_gather(self, kind: str, urgent: bool, tensor: Tensor, output: Tensor) -> Transfer:
        """Pair by pair where it is small or all ranks share memory; otherwise around a ring."""
        output[self.rank].copy_(tensor)
        blocks = _split_bytes(output, [1] * self.world)
        if tensor.numel() * tensor.element_size() < _RING or self._by_memory:
            (own,) = _split_bytes(tensor[None], [1])
            out = [Round([Block(peer, own) for peer in self._ranks_after()])]
            into = [Round([Block(peer, blocks[peer]) for peer in self._ranks_before()])]
        else:
            out, into = self._plan_ring(blocks)
        return self.submit(Transfer(kind, out, into, urgent, output.device))

    def _plan_ring(self, blocks: Sequence[Tensor]) -> tuple[list[Round], list[Round]]:
        """A round sends to the next rank what the round before it brought."""
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        into = [
            Round([Block(before, blocks[(self.rank - hop - 1) % self.world])])
            for hop in range(self.world - 1)
        ]
        out = [
            Round(
                [Block(after, blocks[(self.rank - hop) % self.world])],
                after=into[hop - 1] if hop else None,
            )
            for hop in range(self.world - 1)
        ]
        return out, into

    def _ranks_after(self) -> list[int]:
        """The other ranks, from the next one on: not all ranks send to one at a time."""
        return [(self.rank + distance) % self.world for distance in range(1, self.world)]

    def _ranks_before(self) -> list[int]:
        return [(self.rank - distance) % self.world for distance in range(1, self.world)]

    def submit(self, transfer: Transfer) -> Transfer:
        if self._steps.error is not None:
            transfer.finish_direction(self._steps.error)
        elif self._caller_driven is not None:
            self._caller_driven.submit(transfer)
        else:
            self._start_threads()
            self._queues[_RECEIVE].put(transfer)
            if not (self._sends_at_once and self._try_send(transfer)):
                with self._counting:
                    self._unsent += 1
                self._queues[_SEND].put(transfer)
        return transfer

    def close(self) -> bool:
        """Ends the threads once what was submitted is done."""
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._threads = []
        self._steps.close()
        return True

    def _start_threads(self) -> None:
        if self._threads:
            return
        for way, name, work in (
            (_SEND, "out", self._send_queued),
            (_RECEIVE, "in", self._receive_queued),
        ):
            end = partial(self._queues[way].put, None)
            self._threads.append(start_thread(f"{self.name} {name}", work, end))

    def _send_queued(self) -> None:
        waiting = self._queues[_SEND]
        while (transfer := waiting.get()) is not None:
            with self._sending:
                self._run(transfer, self._steps.send)
            with self._counting:
                self._unsent -= 1
            transfer = None  # its tensors are free while the thread waits for the next

    def _receive_queued(self) -> None:
        waiting = self._queues[_RECEIVE]
        while (transfer := waiting.get()) is not None:
            self._run(transfer, self._steps.receive)
            if waiting.empty():
                _exhaust(self._steps.finish_copies())
            transfer = None

    def _try_send(self, transfer: Transfer) -> bool:
        """Sends it here and now, if nothing is before it and there are slots for all of it: no rank
        may wait for another while it holds back what that one waits for."""
        if len(transfer.out) > 1 or not self._sending.acquire(blocking=False):
            return False
        try:
            if self._unsent or not self._steps.has_slots(transfer):
                return False
            self._run(transfer, self._steps.send)
            return True
        finally:
            self._sending.release()

    def _run(self, transfer: Transfer, work: Callable[[Transfer], Iterator[Ready]]) -> None:
        try:
            with torch.no_grad():
                if self._steps.error is None:
                    _exhaust(work(transfer))
        except BaseException as error:  # noqa: BLE001 - raised where the transfer is waited for
            self._steps.fail(error)
        transfer.finish_direction(self._steps.error)


class CallerDriven:
    """Transfers that the thread which waits for one drives, up to that one: sending and receiving
    by turns, whichever can go on."""

    def __init__(self, steps: TransferSteps, seconds: float) -> None:
        self._steps, self._seconds, self._spin = steps, seconds, _SPIN[steps.device.type]
        self._send, self._receive = _Direction(steps.send), _Direction(steps.receive)

    def submit(self, transfer: Transfer) -> None:
        """Sends what can be sent without waiting."""
        transfer.drive = self.drive_until
        self._send.waiting.append(transfer)
        self._receive.waiting.append(transfer)
        with torch.no_grad():
            while self._advance(self._send):
                pass

    def drive_until(self, last: Transfer) -> None:
        """Drives all transfers up to `last`."""
        since = time.perf_counter()
        with torch.no_grad():
            while not last.done:
                sent, received = self._advance(self._send), self._advance(self._receive)
                if sent or received:
                    since = time.perf_counter()
                    continue
                waited = time.perf_counter() - since
                if waited > self._seconds:
                    self._steps.late = True  # the next step raises
                elif waited > self._spin and not self._send.waiting:
                    self._advance(self._receive, wait=True)
                elif waited > self._spin:
                    time.sleep(_NAP)

    def _advance(self, direction: _Direction, wait: bool = False) -> bool:
        """Goes on with the first transfer of a direction, as far as the next step that may have to
        wait. Whether it could. With `wait` it waits first."""
        if not direction.waiting:
            return False
        if self._steps.error is None:
            try:
                if direction.step(wait or self._steps.late):
                    return True
                if direction.steps is not None:
                    return False
            except BaseException as error:  # noqa: BLE001 - raised where the transfer is waited for
                self._steps.fail(error)
        direction.steps = direction.ready = None
        direction.waiting.popleft().finish_direction(self._steps.error)
        return True


class _Direction:
    def __init__(self, work: Callable[[Transfer], Iterator[Ready]]) -> None:
        self.waiting: deque[Transfer] = deque()
        self.steps: Iterator[Ready] | None = None  # of the first
        self.ready: Ready | None = None
        self._work = work

    def step(self, may_wait: bool) -> bool:
        """Makes a step. Whether there was one and it could be made; `steps` is None after the
        last."""
        if self.steps is None:
            self.steps = self._work(self.waiting[0])
        if self.ready is not None and not may_wait and not _check(self.ready):
            return False
        self.ready = next(self.steps, None)
        if self.ready is None:
            self.steps = None
            return False
        return True


def _check(ready: Ready) -> bool:
    try:
        return ready()
    except (OSError, ValueError):  # a closed socket: the wait that follows says what happened
        return True


def _exhaust(steps: Iterator[Ready]) -> None:
    for _ in steps:
        pass


def _split_bytes(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The bytes of each part of the first dimension."""
    width = tensor.element_size() * (tensor[:1].numel() if tensor.shape[0] else 0)
    return torch.split(view_bytes(tensor.contiguous()), [size * width for size in sizes])
