"""A channel of hostwire: transfers in one order, the same on every rank, carried by two threads. One sends, one receives. Where a
wire allows it, who waits for a transfer does their work instead: to wake a thread takes longer than many a transfer.

    out   device -> slot of the ring -> wire          a slot is copied to while the one before it is on the wire
    in    wire -> slot -> device

On CPU tensors, and over a wire that takes any memory, there are no slots: pieces go from tensor to tensor.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freescale.transport.api import TransportError
from freescale.transport.gate import Gate
from freescale.transport.memory import Pinned
from freescale.transport.threads import reached, started
from freescale.transport.wires import Arriving, Sending, Wire

SLOTS = 8  # of a ring: some are copied to, some are on the wire, some are copied from
AHEAD = 3  # pieces that are expected before the first has come
LARGEST = 4 << 20  # bytes of a piece, and of a slot
URGENT_TIMES = 2  # as large as bulk's are pieces that need not give way
SMALL = 64 << 10  # bytes of a piece that is all latency
AT_ONCE = {"cpu": SLOTS, "cuda": 1}  # slots of what the caller sends itself: more are copied out while others are copied in


@dataclass(frozen=True)
class Part:
    """Bytes of a transfer to or from one peer, whole."""

    peer: int
    bytes: Tensor  # [n], of the tensor that is sent or received


@dataclass
class Round:
    """Parts that travel together. A ring has several: a round sends what the one before it brought."""

    parts: Sequence[Part]
    landed: threading.Event = field(default_factory=threading.Event)  # of received rounds: what they brought can be sent on
    after: Round | None = None


class Transfer:
    """What is waited for. `urgent` transfers are given way to."""

    def __init__(self, kind: str, out: Sequence[Round], into: Sequence[Round], urgent: bool, device: torch.device) -> None:
        self.kind, self.out, self.into, self.urgent, self.device = kind, out, into, urgent, device
        self.cuda = device.type == "cuda"
        self.error: BaseException | None = None
        self.begun = _recorded(device, blocking=True)  # a core that waits for compute is free for others
        self.size = sum(part.bytes.numel() for round_ in out for part in round_.parts)
        self.arrived: torch.cuda.Event | None = None
        self._halves = 2
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._gate: Gate | None = None  # that it has begun to be urgent at
        self.received = False
        self.land: Callable[[Transfer], None] | None = None  # receives it, in the thread that waits

    def ready(self, gate: Gate) -> None:
        """What it sends is there. From now on, if it is urgent, bulk gives way to it: not while the device still computes it."""
        with self._lock:
            if self.urgent and not self._done.is_set():
                self._gate = gate
                gate.begin()

    def half_done(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._halves -= 1
            over = not self._done.is_set() and (self._halves == 0 or error is not None)
            if over:
                self.error = error
                self._done.set()
        if over:
            self.out, self.into = (), ()
            if self._gate is not None:
                self._gate.end()

    def wait(self) -> None:
        """What the caller issues from now on has the result. Whoever sends and receives keeps the time."""
        if self.land is not None and not self._done.is_set():
            self.land(self)
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)


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
        """`routes`: the wire to each rank. `ring`: SLOTS slots, which the wires can send from. `piece`: the largest, in bytes.
        `patient`: who submits waits soon, and does nothing else meanwhile."""
        self.name, self.rank, self.device, self.routes = name, rank, device, routes
        self._gate, self._piece, self._seconds = gate, piece, seconds
        self._largest = min(LARGEST, URGENT_TIMES * piece)
        slot = ring.bytes.numel() // SLOTS
        assert not slot or self._largest <= slot, (piece, slot)
        cuda = device.type == "cuda"
        self._slots = ring.bytes.split(slot) if ring.bytes.numel() else ()
        self._into = Pinned(SLOTS * self._largest, device) if cuda and any(wire.direct for wire in routes) else None
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)] if cuda else [None, None]
        self._sent: list[list[tuple[Sending, int]]] = [[] for _ in self._slots]  # what leaves from each slot, and to whom
        self._prompt = all(not wire.direct for wire in routes)  # sends return at once: what is sent is a copy, in a slot
        self._patient, self._sending = patient and self._prompt, threading.Lock()
        self._unlanded: deque[Transfer] = deque()
        self._counting, self._waiting = threading.Lock(), 0  # transfers that the thread has to send
        self._queues: list[queue.SimpleQueue[Transfer | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._landing: deque[tuple[Any, Arriving]] = deque()  # copies to the device that may be under way
        self._filled = 0  # slots, ever: out
        self._taken = 0  # slots of `_into`, ever

    def submit(self, transfer: Transfer) -> None:
        if self._error is not None:
            transfer.half_done(self._error)
            return
        if self._patient:
            self._unlanded.append(transfer)
            transfer.land = self._land_until
        else:
            self._start_threads()
            self._queues[1].put(transfer)
        if self._prompt and (self._patient or not transfer.cuda) and self._sent_at_once(transfer):
            return
        self._start_threads()
        with self._counting:
            self._waiting += 1
        self._queues[0].put(transfer)

    def close(self) -> None:
        """Ends the threads once what was submitted is done; the wires are whoever's who opened them."""
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._threads = []
        if self._into is not None:
            self._into.close()

    # ---- who works: threads or, rather than wake one, the caller

    def _start_threads(self) -> None:
        if not self._threads:
            for half, (way, work) in enumerate((("out", self._send), ("in", self._receive))):
                end = partial(self._queues[half].put, None)
                self._threads.append(started(f"{self.name} {way}", partial(self._work, half, work), end))

    def _work(self, half: int, work: Callable[[Transfer], None]) -> None:
        waiting = self._queues[half]
        while (transfer := waiting.get()) is not None:
            if half:
                self._half(half, transfer, work)
                if waiting.empty():
                    self._settle(0)
            else:
                with self._sending:
                    self._half(half, transfer, work)
                with self._counting:
                    self._waiting -= 1
            transfer = None

    def _sent_at_once(self, transfer: Transfer) -> bool:
        """Sends it here and now, if nothing is before it and there are slots for all of it: no rank may wait for another with what
        that one waits for still in its hands."""
        if len(transfer.out) > 1 or not self._sending.acquire(blocking=False):
            return False
        try:
            count = sum(1 for round_ in transfer.out for _ in self._batches(round_.parts, transfer))
            slots = [number % SLOTS for number in range(self._filled, self._filled + min(count, SLOTS))]
            free = all(sending.ready() for slot in slots for sending, _ in self._sent[slot])
            if count > AT_ONCE[self.device.type] or self._waiting or not free:
                return False
            self._half(0, transfer, self._send)
            return True
        finally:
            self._sending.release()

    def _land_until(self, last: Transfer) -> None:
        """Receives what was submitted up to `last`, in the thread that waits for it."""
        while not last.received:
            transfer = self._unlanded.popleft()
            self._half(1, transfer, self._receive)

    def _half(self, half: int, transfer: Transfer, work: Callable[[Transfer], None]) -> None:
        stream = self._streams[half]
        try:
            with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
                if self._error is None:
                    if transfer.begun is not None:
                        reached(transfer.begun)  # on the host: what waits in a stream can hold up other streams
                    if not half:
                        transfer.ready(self._gate)
                    work(transfer)
        except BaseException as error:  # noqa: BLE001 - raised where the transfer is waited for
            self._fail(error)
        transfer.received = transfer.received or half == 1
        transfer.half_done(self._error)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            for wire in {id(wire): wire for wire in self.routes}.values():
                wire.close()

    # ---- out

    def _send(self, transfer: Transfer) -> None:
        left = sum(part.bytes.numel() for round_ in transfer.out for part in round_.parts)
        for round_ in transfer.out:
            if round_.after is not None:
                self._landed(round_.after, transfer)
            direct: deque[tuple[int, int, Sending]] = deque()
            staged: deque[tuple[Any, int, list[tuple[int, Tensor]]]] = deque()
            for batch in self._batches(round_.parts, transfer):
                if not transfer.urgent:
                    self._gate.give_way()
                if not self._by_slot(batch[0][0], transfer):
                    ((peer, piece),) = batch
                    if len(direct) >= AHEAD:
                        left = self._wait_sent(*direct.popleft(), left, transfer)
                    direct.append((peer, piece.numel(), self._guarded(self.routes[peer].send, transfer, peer, left, peer, piece)))
                    continue
                staged.append(self._fill(batch, transfer, left))
                if len(staged) > 2:
                    left = self._post(*staged.popleft(), left, transfer)
            while staged:
                left = self._post(*staged.popleft(), left, transfer)
            while direct:
                left = self._wait_sent(*direct.popleft(), left, transfer)
        # Nothing is sent from the tensor any more: what is in slots is a copy.

    def _by_slot(self, peer: int, transfer: Transfer) -> bool:
        return transfer.cuda or not self.routes[peer].direct

    def _batches(self, parts: Sequence[Part], transfer: Transfer) -> Iterator[list[tuple[int, Tensor]]]:
        """Pieces that go together: through one slot if they go by slots, alone otherwise."""
        batch: list[tuple[int, Tensor]] = []
        size = 0
        for part in parts:
            for piece in part.bytes.split(self._piece_of(part, transfer)) if part.bytes.numel() else ():
                if not self._by_slot(part.peer, transfer):
                    yield [(part.peer, piece)]
                    continue
                if batch and size + piece.numel() > self._largest:
                    yield batch
                    batch, size = [], 0
                batch.append((part.peer, piece))
                size += -(-piece.numel() // 16) * 16
        if batch:
            yield batch

    def _fill(self, batch: list[tuple[int, Tensor]], transfer: Transfer, left: int) -> tuple[Any, int, list[tuple[int, Tensor]]]:
        """Copies the pieces to the next slot, once all that left from it has been read."""
        number = self._filled % SLOTS
        self._filled += 1
        for sending, peer in self._sent[number]:
            self._guarded(sending.wait, transfer, peer, left, self._seconds)
        self._sent[number] = []
        begin, copies = 0, []
        for peer, piece in batch:
            copy = self._slots[number][begin : begin + piece.numel()]
            copy.copy_(piece, non_blocking=True)
            copies.append((peer, copy))
            begin += -(-piece.numel() // 16) * 16  # aligned for every dtype
        return _recorded(transfer.device), number, copies

    def _post(self, copied: Any, number: int, copies: list[tuple[int, Tensor]], left: int, transfer: Transfer) -> int:
        if copied is not None:
            copied.synchronize()
        for peer, copy in copies:
            self._sent[number].append((self._guarded(self.routes[peer].send, transfer, peer, left, peer, copy), peer))
            left -= copy.numel()
        if transfer.urgent:
            self._gate.moved()
        return left

    def _wait_sent(self, peer: int, size: int, sending: Sending, left: int, transfer: Transfer) -> int:
        self._guarded(sending.wait, transfer, peer, left, self._seconds)
        if transfer.urgent:
            self._gate.moved()
        return left - size

    # ---- in

    def _receive(self, transfer: Transfer) -> None:
        left = sum(part.bytes.numel() for round_ in transfer.into for part in round_.parts)
        for round_ in transfer.into:
            expected: deque[tuple[int, Tensor, Arriving]] = deque()
            for part in round_.parts:
                for piece in part.bytes.split(self._piece_of(part, transfer)) if part.bytes.numel() else ():
                    if not transfer.urgent:
                        self._gate.give_way()
                    if len(expected) >= AHEAD:
                        left = self._land(*expected.popleft(), left, transfer)
                    expected.append((part.peer, piece, self._expect(part.peer, piece, transfer, left)))
            while expected:
                left = self._land(*expected.popleft(), left, transfer)
            transfer.arrived = _recorded(transfer.device)
            round_.landed.set()

    def _expect(self, peer: int, piece: Tensor, transfer: Transfer, left: int) -> Arriving:
        wire, into = self.routes[peer], None
        if wire.direct:
            into = piece
            if transfer.cuda:
                assert self._into is not None
                self._settle(SLOTS - AHEAD - 1)  # its slots are used in turn
                begin = self._taken % SLOTS * self._largest
                self._taken += 1
                into = self._into.bytes[begin : begin + piece.numel()]
        return self._guarded(wire.expect, transfer, peer, left, peer, piece.numel(), into)

    def _land(self, peer: int, piece: Tensor, arriving: Arriving, left: int, transfer: Transfer) -> int:
        if not arriving.ready():
            self._settle(0)  # nobody may have to wait for a slot of which this rank, itself waiting, has not said that it read it
        came = self._guarded(arriving.wait, transfer, peer, left, self._seconds)
        if transfer.cuda and piece.numel() <= SMALL:  # its slot is free at once: nothing waits for a copy of a few bytes
            piece.copy_(torch.empty(came.shape, dtype=came.dtype, pin_memory=True).copy_(came), non_blocking=True)
            self._settle(0)
            arriving.free()
        else:
            if came.data_ptr() != piece.data_ptr():
                piece.copy_(came, non_blocking=True)
            self._landing.append((_recorded(transfer.device), arriving))
            self._settle(2 if transfer.cuda else 0)
        if transfer.urgent:
            self._gate.moved()
        return left - piece.numel()

    def _settle(self, leave: int) -> None:
        """All but some copies to the device have ended; where they came from is free."""
        while len(self._landing) > leave:
            copied, arriving = self._landing.popleft()
            if copied is not None:
                copied.synchronize()
            arriving.free()

    # ---- both

    def _piece_of(self, part: Part, transfer: Transfer) -> int:
        return piece_of(part.bytes.numel(), self._largest if transfer.urgent else self._piece)

    def _landed(self, round_: Round, transfer: Transfer) -> None:
        """Waits until another thread has received a round; its own waits are limited, and its failure ends this one."""
        while not round_.landed.wait(0.1):
            if self._error is not None:
                raise self._error
        if transfer.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(transfer.arrived)

    def _guarded(self, call: Callable[..., Any], transfer: Transfer, peer: int, left: int, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except torch.AcceleratorError:  # a kernel's fault, which the host hears of here
            raise
        except (RuntimeError, OSError) as error:
            if self._error is not None:
                raise self._error from error
            what = f"{'urgent' if transfer.urgent else 'bulk'} exchange of {transfer.kind} failed"
            reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
            raise TransportError(
                f"rank {self.rank}: {what}: rank {peer} died or fell silent, {left:,} bytes outstanding ({reason})"
            ) from error


def piece_of(size: int, largest: int) -> int:
    """Bytes of a piece of a part, the same on both sides: large parts in quarters, so that the stages overlap."""
    quarter = -(-size // 4 // 4096) * 4096
    return max(1, min(largest, max(quarter, 1 << 20)))


def _recorded(device: torch.device, blocking: bool = False) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=blocking)
    event.record()
    return event
