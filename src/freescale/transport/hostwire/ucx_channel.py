"""A channel over UCX, which the engine cannot drive. One thread sends, another receives.

    send      device -> slot of the ring -> wire
    receive   wire -> slot -> device

A slot is filled while the one before it is on the wire. CPU tensors take no slots: pieces go from
tensor to tensor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from freescale.packed import view_bytes
from freescale.streams import current_stream, new_stream, record_event_on
from freescale.transport.api import Sizes
from freescale.transport.event_waits import wait_for_event
from freescale.transport.hostwire.channel import SLOTS, ChannelParts, Pinned, make_error
from freescale.transport.hostwire.wires.ucx import Piece, UcxWire
from freescale.transport.threads import start_thread

AHEAD = 3  # pieces that are expected before the first has arrived
_ALIGNMENT = 16  # of a piece in a slot: enough for every dtype
_PAGE = 4096
_SEND, _RECEIVE = 0, 1

_T = TypeVar("_T")
_Part = tuple[int, Tensor]  # peer, bytes for it or from it
# number of a slot, its pieces, and when they are copied to it
_Filled = tuple[int, list[_Part], torch.cuda.Event | None]


class Gate:
    """Bulk traffic of this rank gives way to urgent traffic between pieces: csrc/gate.h."""

    def __init__(self, patience: float) -> None:
        """`patience`: urgent traffic that is still for so many seconds waits for a slow rank."""
        self._patience = patience
        self._condition = threading.Condition()
        self._urgent = 0  # transfers under way
        self._moved = 0.0  # when one of their pieces moved last

    @contextmanager
    def hold(self, urgent: bool) -> Iterator[None]:
        """Around one direction of a transfer, which bulk gives way to if it is urgent."""
        if not urgent:
            yield
            return
        with self._condition:
            self._urgent += 1
            self._moved = time.monotonic()
        try:
            yield
        finally:
            with self._condition:
                self._urgent -= 1
                self._condition.notify_all()

    def note_movement(self) -> None:
        self._moved = time.monotonic()

    def give_way(self) -> None:
        """Until bulk may move, but not for ever: the urgent transfer may depend on this bulk."""
        if not self._urgent:
            return
        with self._condition:
            while self._urgent and (left := self._moved + self._patience - time.monotonic()) > 0:
                self._condition.wait(left)


@dataclass
class UcxTransfer:
    """`out`, `into`: parts of the tensors that are sent and received."""

    kind: str
    urgent: bool
    device: torch.device
    out: Sequence[_Part]
    into: Sequence[_Part]

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"
        self.left = [sum(part.numel() for _, part in parts) for parts in (self.out, self.into)]
        # What is sent is complete, and the output is free. Blocking: a core that waits for compute
        # is free for other threads.
        self.inputs_ready = record_event_on(self.device, blocking=True)
        self.arrived: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.finished = threading.Event(), threading.Event()  # by direction

    def finish(self, way: int, error: BaseException | None) -> None:
        self.error = self.error or error
        self.finished[way].set()

    def wait(self) -> None:
        """Waits; work queued on the current stream afterwards sees the result. The channel's
        threads watch the time. Raises what ended the transfer."""
        for event in self.finished:
            event.wait()
        self.out, self.into = (), ()
        if self.error is not None:
            raise self.error
        if self.arrived is not None:
            current_stream(self.device).wait_event(self.arrived)


class UcxChannel:
    """As `EngineChannel`, over UCX between `world` ranks. Its threads are named after `name`."""

    def __init__(
        self, name: str, parts: ChannelParts, world: int, wire: UcxWire, gate: Gate
    ) -> None:
        self.name, self.rank, self.world = name, parts.rank, world
        self._wire, self._gate, self._seconds = wire, gate, parts.seconds
        self._largest = {False: parts.piece, True: parts.largest}  # by urgency
        self._error: BaseException | None = None
        cuda = parts.device.type == "cuda"
        self._slots = torch.split(parts.ring.bytes, parts.slot) if parts.slot else ()
        self._inbox = Pinned(SLOTS * parts.largest, parts.device) if cuda else None
        self._streams = [new_stream(parts.device, priority=-1) if cuda else None for _ in range(2)]
        self._sent: list[list[Piece]] = [[] for _ in range(SLOTS)]  # from each slot of the ring
        self._filled = 0  # slots of the ring, ever
        self._copying: deque[torch.cuda.Event] = deque()  # copies from the inbox under way
        self._expected = 0  # slots of the inbox, ever
        self._queues: list[queue.SimpleQueue[UcxTransfer | None]] = [
            queue.SimpleQueue() for _ in range(2)
        ]
        self._threads: list[threading.Thread] = []

    def all_to_all(
        self, kind: str, urgent: bool, tensor: Tensor, send: Sizes, output: Tensor, receive: Sizes
    ) -> UcxTransfer:
        sent, received = _split_bytes(tensor, send), _split_bytes(output, receive)
        if send[self.rank]:
            received[self.rank].copy_(sent[self.rank])
        return self._submit(kind, urgent, output.device, sent, received)

    def all_gather(self, kind: str, urgent: bool, tensor: Tensor, output: Tensor) -> UcxTransfer:
        output[self.rank].copy_(tensor)
        blocks = _split_bytes(output, [1] * self.world)
        return self._submit(kind, urgent, output.device, [blocks[self.rank]] * self.world, blocks)

    def _submit(
        self,
        kind: str,
        urgent: bool,
        device: torch.device,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
    ) -> UcxTransfer:
        """Starts a transfer of the bytes for and from each rank."""
        if self._error is not None:
            raise self._error
        # in order of distance: not all ranks send to the same one at a time
        out = [(self.rank + distance) % self.world for distance in range(1, self.world)]
        into = [(self.rank - distance) % self.world for distance in range(1, self.world)]
        transfer = UcxTransfer(
            kind,
            urgent,
            device,
            [(peer, sent[peer]) for peer in out],
            [(peer, received[peer]) for peer in into],
        )
        if not self._threads:
            for way, name, work in ((_SEND, "out", self._send), (_RECEIVE, "in", self._receive)):
                run, end = partial(self._run, way, work), partial(self._queues[way].put, None)
                self._threads.append(start_thread(f"{self.name} {name}", run, end))
        for waiting in self._queues:
            waiting.put(transfer)
        return transfer

    def close(self) -> bool:
        """Ends the threads once what was submitted is done."""
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._threads = []
        if self._inbox is not None:
            self._inbox.close()
        return True

    # ---- in the threads

    def _run(self, way: int, work: Callable[[UcxTransfer], None]) -> None:
        while (transfer := self._queues[way].get()) is not None:
            try:
                if transfer.inputs_ready is not None and self._error is None:
                    # on the host: a stream that waits can hold up others
                    wait_for_event(transfer.inputs_ready)
                with torch.no_grad(), self._gate.hold(transfer.urgent):
                    if self._error is None:
                        work(transfer)
            except BaseException as error:  # noqa: BLE001 - raised where the transfer is waited for
                if self._error is None:
                    self._error = error
                    self._wire.close()
            transfer.finish(way, self._error)
            transfer = None  # its tensors are free while the thread waits for the next

    def _send(self, transfer: UcxTransfer) -> None:
        """When it returns nothing is sent from the tensor any more: slots hold copies."""
        filled: deque[_Filled] = deque()
        for batch in self._group_pieces(transfer):
            if not transfer.urgent:
                self._gate.give_way()
            filled.append(self._fill_slot(batch, transfer))
            if not transfer.cuda or len(filled) > 2:
                self._send_slot(filled.popleft(), transfer)
        while filled:
            self._send_slot(filled.popleft(), transfer)
        for slot in () if transfer.cuda else range(SLOTS):
            self._wait_until_sent(slot, transfer)

    def _group_pieces(self, transfer: UcxTransfer) -> Iterator[list[_Part]]:
        """Pieces that share a slot; each alone if there are no slots."""
        batch: list[_Part] = []
        size = 0
        for peer, piece in self._cut(transfer.out, transfer):
            full = not transfer.cuda or size + piece.numel() > self._largest[True]
            if batch and full:
                yield batch
                batch, size = [], 0
            batch.append((peer, piece))
            size += _align(piece.numel())
        if batch:
            yield batch

    def _fill_slot(self, batch: list[_Part], transfer: UcxTransfer) -> _Filled:
        """Copies a batch to the next slot. On a CPU a slot is only counted."""
        slot = self._filled % SLOTS
        self._filled += 1
        self._wait_until_sent(slot, transfer)
        if not transfer.cuda:
            return slot, batch, None
        begin, copies = 0, []
        with torch.cuda.stream(self._streams[_SEND]):
            for peer, piece in batch:
                copy = self._slots[slot][begin : begin + piece.numel()]
                copies.append((peer, copy.copy_(piece, non_blocking=True)))
                begin += _align(piece.numel())
        return slot, copies, record_event_on(transfer.device, self._streams[_SEND])

    def _send_slot(self, filled: _Filled, transfer: UcxTransfer) -> None:
        slot, batch, copied = filled
        if copied is not None:
            copied.synchronize()
        for peer, piece in batch:
            send = partial(self._wire.send, peer, piece)
            self._sent[slot].append(self._guard(send, transfer, peer))
            transfer.left[_SEND] -= piece.numel()
        if transfer.urgent:
            self._gate.note_movement()

    def _wait_until_sent(self, slot: int, transfer: UcxTransfer) -> None:
        for piece in self._sent[slot]:
            self._guard(partial(piece.wait, self._seconds), transfer, piece.peer)
            if transfer.urgent:
                self._gate.note_movement()
        self._sent[slot] = []

    def _receive(self, transfer: UcxTransfer) -> None:
        expected: deque[tuple[Tensor, Piece]] = deque()
        for peer, piece in self._cut(transfer.into, transfer):
            if not transfer.urgent:
                self._gate.give_way()
            if len(expected) >= AHEAD:
                self._land(*expected.popleft(), transfer)
            expected.append((piece, self._expect(peer, piece, transfer)))
        while expected:
            self._land(*expected.popleft(), transfer)
        transfer.arrived = record_event_on(transfer.device, self._streams[_RECEIVE])
        self._wait_for_copies()

    def _expect(self, peer: int, piece: Tensor, transfer: UcxTransfer) -> Piece:
        into = piece
        if transfer.cuda:
            assert self._inbox is not None
            self._wait_for_copies(leave=SLOTS - AHEAD - 1)  # slots of the inbox are used in turn
            begin = self._expected % SLOTS * self._largest[True]
            self._expected += 1
            into = self._inbox.bytes[begin : begin + piece.numel()]
        return self._guard(partial(self._wire.expect, peer, into), transfer, peer)

    def _land(self, piece: Tensor, arriving: Piece, transfer: UcxTransfer) -> None:
        """Waits for a piece and copies it to its place."""
        self._guard(partial(arriving.wait, self._seconds), transfer, arriving.peer)
        if transfer.cuda:
            with torch.cuda.stream(self._streams[_RECEIVE]):
                piece.copy_(arriving.memory, non_blocking=True)
            copied = record_event_on(transfer.device, self._streams[_RECEIVE])
            assert copied is not None
            self._copying.append(copied)
        transfer.left[_RECEIVE] -= piece.numel()
        if transfer.urgent:
            self._gate.note_movement()

    def _wait_for_copies(self, leave: int = 0) -> None:
        """Waits until at most `leave` copies from the inbox are under way."""
        while len(self._copying) > leave:
            self._copying.popleft().synchronize()

    def _cut(self, parts: Sequence[_Part], transfer: UcxTransfer) -> Iterator[_Part]:
        """Cuts the parts into pieces."""
        for peer, part in parts:
            if part.numel():
                sizes = cut(part.numel(), self._largest[transfer.urgent])
                yield from ((peer, piece) for piece in torch.split(part, sizes))

    def _guard(self, call: Callable[[], _T], transfer: UcxTransfer, peer: int) -> _T:
        """Calls; a failure of the wire becomes an error that names the peer and the bytes left."""
        try:
            return call()
        except torch.AcceleratorError:  # a kernel failed; the host learns of it here
            raise
        except (RuntimeError, OSError) as error:
            if self._error is not None:
                raise self._error from error
            reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
            kind, urgent, left = transfer.kind, transfer.urgent, sum(transfer.left)
            raise make_error(self.rank, kind, urgent, peer, left, reason) from error


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _split_bytes(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The bytes of each part of the first dimension."""
    width = tensor.element_size() * (tensor[:1].numel() if tensor.shape[0] else 0)
    return torch.split(view_bytes(tensor.contiguous()), [size * width for size in sizes])


def cut(size: int, largest: int) -> list[int]:
    """Bytes of the pieces of a block, the same on both sides. Its first and last quarter are
    pieces, so the stages start and end soon after each other. The middle is cut less often: every
    copy costs some microseconds on top of its bytes."""
    quarter = -(-size // 4 // _PAGE) * _PAGE
    end = min(largest, max(quarter, 1 << 20))
    if size <= 2 * end:
        return [piece for piece in (min(size, end), size - end) if piece > 0]
    between = min(largest, 2 * end)
    whole, rest = divmod(size - 2 * end, between)
    return [end, *[between] * whole, *([rest] if rest else []), end]
