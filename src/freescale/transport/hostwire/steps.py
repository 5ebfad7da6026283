"""The two directions of a transfer that Python drives, step by step.

    send      device -> slot of the ring -> wire
    receive   wire -> slot -> device

A slot is copied to while the one before it is on the wire. On CPU tensors, and over a wire that
takes any memory, there are no slots: pieces go from tensor to tensor.

A direction is a generator. Before a step that may have to wait it yields a function that tells
whether it would; whoever runs it can ask and do something else meanwhile, or just go on and wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from freescale.streams import current_stream, has_happened, new_stream, record_event_on
from freescale.transport.event_waits import wait_for_event
from freescale.transport.hostwire.gate import Gate
from freescale.transport.hostwire.pinned import Pinned
from freescale.transport.hostwire.transfer import (
    Block,
    Round,
    Transfer,
    count_bytes,
    cut,
    make_error,
)
from freescale.transport.hostwire.wires.api import Arriving, PieceWire, Sending

SLOTS = 8  # of a ring: some are copied to, some are on the wire, some are copied from
AHEAD = 3  # pieces that are expected before the first has come
LARGEST = 4 << 20  # bytes of a piece, and of a slot
URGENT_TIMES = 2  # as large as bulk's are pieces that need not give way
SMALL = 64 << 10  # bytes of a piece that is all latency
_ALIGNMENT = 16  # of a piece in a slot: enough for every dtype

_T = TypeVar("_T")
Ready = Callable[[], bool]
Piece = tuple[int, Tensor]  # peer, bytes
StagedSlot = tuple[torch.cuda.Event | None, int, list[Piece]]  # copied, number, pieces in it


@dataclass(frozen=True)
class ChannelParts:
    """What a channel is made of, whoever drives it.

    Attributes:
        rank: of this process.
        device: of the tensors.
        ring: SLOTS slots, which wires send from and ranks of this machine can read.
        piece: the largest of bulk traffic, in bytes.
        seconds: that a peer may be silent.
    """

    rank: int
    device: torch.device
    ring: Pinned
    piece: int
    seconds: float

    def __post_init__(self) -> None:
        assert not self.slot or self.largest <= self.slot, (self.piece, self.slot)

    @property
    def largest(self) -> int:
        """Bytes of the largest piece of urgent traffic."""
        return min(LARGEST, URGENT_TIMES * self.piece)

    @property
    def slot(self) -> int:
        """Bytes of a slot; 0 without a ring."""
        return self.ring.bytes.numel() // SLOTS


class TransferSteps:
    """Transfers of one channel, one after another. `error` is what ended the channel; `late` is set
    by whoever runs the steps once it has waited long enough."""

    def __init__(self, parts: ChannelParts, routes: Sequence[PieceWire], gate: Gate) -> None:
        self.rank, self.device, self.routes = parts.rank, parts.device, routes
        self.error: BaseException | None = None
        self.late = False
        self._gate, self._piece, self._seconds = gate, parts.piece, parts.seconds
        self._largest, device = parts.largest, parts.device
        cuda = device.type == "cuda"
        self._slots = torch.split(parts.ring.bytes, parts.slot) if parts.slot else ()
        self._into = (
            Pinned(SLOTS * self._largest, device)
            if cuda and any(wire.direct for wire in routes)
            else None
        )
        self._send_stream = new_stream(device, priority=-1) if cuda else None
        self._receive_stream = new_stream(device, priority=-1) if cuda else None
        # what leaves from each slot, and to whom
        self._sent: list[list[tuple[Sending, int]]] = [[] for _ in self._slots]
        # copies to the device that may be under way
        self._landing: deque[tuple[torch.cuda.Event | None, Arriving]] = deque()
        self._filled = 0  # slots of the ring, ever
        self._taken = 0  # slots of `_into`, ever

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            for wire in {id(wire): wire for wire in self.routes}.values():
                wire.close()

    def close(self) -> None:
        if self._into is not None:
            self._into.close()

    # ---- sending

    def send(self, transfer: Transfer) -> Iterator[Ready]:
        """When it ends nothing is sent from the tensor any more: what is in slots is a copy."""
        yield from self._wait_for_inputs(transfer)
        transfer.hold_gate(self._gate)
        left = count_bytes(transfer.out)
        for round_ in transfer.out:
            if round_.after is not None:
                yield round_.after.landed.is_set
                self._wait_for_round(round_.after, transfer)
            direct: deque[tuple[int, int, Sending]] = deque()
            staged: deque[StagedSlot] = deque()
            for batch in self._group_pieces(round_.blocks, transfer):
                if not transfer.urgent:
                    yield self._gate.is_open
                    self._gate.give_way()
                if not self._uses_slots(batch[0][0], transfer):
                    ((peer, piece),) = batch
                    if len(direct) >= AHEAD:
                        left = self._wait_until_sent(*direct.popleft(), left, transfer)
                    sending = self._send_piece(peer, piece, transfer, left)
                    direct.append((peer, piece.numel(), sending))
                    continue
                yield from self._wait_for_slot(transfer, left)
                staged.append(self._fill_slot(batch, transfer))
                if len(staged) > 2:
                    yield from _wait_for_copy(staged[0][0])
                    left = self._send_slot(staged.popleft(), left, transfer)
            while staged:
                yield from _wait_for_copy(staged[0][0])
                left = self._send_slot(staged.popleft(), left, transfer)
            while direct:
                left = self._wait_until_sent(*direct.popleft(), left, transfer)

    def has_slots(self, transfer: Transfer) -> bool:
        """Whether sending it would not wait for a peer."""
        count = sum(
            1 for round_ in transfer.out for _ in self._group_pieces(round_.blocks, transfer)
        )
        slots = [number % SLOTS for number in range(self._filled, self._filled + min(count, SLOTS))]
        return count <= SLOTS and all(
            sending.ready() for slot in slots for sending, _ in self._sent[slot]
        )

    def _uses_slots(self, peer: int, transfer: Transfer) -> bool:
        return transfer.cuda or not self.routes[peer].direct

    def _group_pieces(self, blocks: Sequence[Block], transfer: Transfer) -> Iterator[list[Piece]]:
        """Pieces that go together: through one slot if they go by slots, alone otherwise."""
        batch: list[Piece] = []
        size = 0
        for block in blocks:
            for piece in self._cut(block, transfer):
                if not self._uses_slots(block.peer, transfer):
                    yield [(block.peer, piece)]
                    continue
                if batch and size + piece.numel() > self._largest:
                    yield batch
                    batch, size = [], 0
                batch.append((block.peer, piece))
                size += _align(piece.numel())
        if batch:
            yield batch

    def _wait_for_slot(self, transfer: Transfer, left: int) -> Iterator[Ready]:
        """Until all that left from the next slot has been read."""
        number = self._filled % SLOTS
        for sending, peer in self._sent[number]:
            yield sending.ready
            self._guard(partial(sending.wait, self._get_patience()), transfer, peer, left)
        self._sent[number] = []

    def _fill_slot(self, batch: list[Piece], transfer: Transfer) -> StagedSlot:
        """Copies the pieces to the next slot."""
        number = self._filled % SLOTS
        self._filled += 1
        begin, copies = 0, []
        with _use_stream(self._send_stream):
            for peer, piece in batch:
                copy = self._slots[number][begin : begin + piece.numel()]
                copy.copy_(piece, non_blocking=True)
                copies.append((peer, copy))
                begin += _align(piece.numel())
        return record_event_on(transfer.device, self._send_stream), number, copies

    def _send_slot(self, staged: StagedSlot, left: int, transfer: Transfer) -> int:
        """Sends the pieces of a slot. Returns what is left of `left` bytes."""
        _, number, copies = staged
        for peer, copy in copies:
            self._sent[number].append((self._send_piece(peer, copy, transfer, left), peer))
            left -= copy.numel()
        if transfer.urgent:
            self._gate.note_movement()
        return left

    def _send_piece(self, peer: int, piece: Tensor, transfer: Transfer, left: int) -> Sending:
        return self._guard(partial(self.routes[peer].send, peer, piece), transfer, peer, left)

    def _wait_until_sent(
        self, peer: int, size: int, sending: Sending, left: int, transfer: Transfer
    ) -> int:
        self._guard(partial(sending.wait, self._seconds), transfer, peer, left)
        if transfer.urgent:
            self._gate.note_movement()
        return left - size

    # ---- receiving

    def receive(self, transfer: Transfer) -> Iterator[Ready]:
        yield from self._wait_for_inputs(transfer)
        left = count_bytes(transfer.into)
        for round_ in transfer.into:
            expected: deque[tuple[int, Tensor, Arriving]] = deque()
            for block in round_.blocks:
                for piece in self._cut(block, transfer):
                    if not transfer.urgent:
                        yield self._gate.is_open
                        self._gate.give_way()
                    if len(expected) >= AHEAD:
                        yield from self._land(*expected[0], left, transfer)
                        left -= expected.popleft()[1].numel()
                    arriving = self._expect(block.peer, piece, transfer, left)
                    expected.append((block.peer, piece, arriving))
            while expected:
                yield from self._land(*expected[0], left, transfer)
                left -= expected.popleft()[1].numel()
            transfer.arrived = record_event_on(transfer.device, self._receive_stream)
            round_.landed.set()
        # This rank may turn to something else now, while a peer that still sends to others waits
        # for a slot that it has not freed.
        yield from self.finish_copies()

    def finish_copies(self, leave: int = 0) -> Iterator[Ready]:
        """Waits until at most `leave` copies to the device are under way, and frees the memory that
        the others came from."""
        while len(self._landing) > leave:
            yield from _wait_for_copy(self._landing[0][0])
            self._landing.popleft()[1].free()

    def _expect(self, peer: int, piece: Tensor, transfer: Transfer, left: int) -> Arriving:
        wire, into = self.routes[peer], None
        if wire.direct:
            into = piece
            if transfer.cuda:
                assert self._into is not None
                for _ in self.finish_copies(SLOTS - AHEAD - 1):  # its slots are used in turn
                    pass
                begin = self._taken % SLOTS * self._largest
                self._taken += 1
                into = self._into.bytes[begin : begin + piece.numel()]
        return self._guard(partial(wire.expect, peer, piece.numel(), into), transfer, peer, left)

    def _land(
        self, peer: int, piece: Tensor, arriving: Arriving, left: int, transfer: Transfer
    ) -> Iterator[Ready]:
        """Waits for a piece and copies it to its place."""
        if not arriving.ready():
            # This rank may wait long: first it frees the slots that it has read, for which others
            # may wait.
            yield from self.finish_copies()
            yield arriving.ready
        came = self._guard(partial(arriving.wait, self._get_patience()), transfer, peer, left)
        # its slot is free at once: nothing waits for a copy of a few bytes
        if transfer.cuda and piece.numel() <= SMALL:
            pinned = torch.empty(came.shape, dtype=came.dtype, pin_memory=True).copy_(came)
            with _use_stream(self._receive_stream):
                piece.copy_(pinned, non_blocking=True)
            yield from self.finish_copies()
            arriving.free()
        else:
            if came.data_ptr() != piece.data_ptr():
                with _use_stream(self._receive_stream):
                    piece.copy_(came, non_blocking=True)
            copied = record_event_on(transfer.device, self._receive_stream)
            self._landing.append((copied, arriving))
            yield from self.finish_copies(2 if transfer.cuda else 0)
        if transfer.urgent:
            self._gate.note_movement()

    # ---- both

    def _wait_for_inputs(self, transfer: Transfer) -> Iterator[Ready]:
        """On the host: what waits in a stream can hold up other streams."""
        if (event := transfer.inputs_ready) is not None:
            yield partial(has_happened, event)
            wait_for_event(event)

    def _cut(self, block: Block, transfer: Transfer) -> Sequence[Tensor]:
        size = block.bytes.numel()
        if not size:
            return ()
        largest = self._largest if transfer.urgent else self._piece
        return torch.split(block.bytes, cut(size, largest))

    def _get_patience(self) -> float:
        return 0.001 if self.late else self._seconds

    def _wait_for_round(self, round_: Round, transfer: Transfer) -> None:
        """Waits until another thread has received a round; its own waits are limited, and its
        failure ends this one."""
        while not round_.landed.wait(0.1):
            if self.error is not None:
                raise self.error
        if transfer.arrived is not None:
            with _use_stream(self._send_stream):
                current_stream(self.device).wait_event(transfer.arrived)

    def _guard(self, call: Callable[[], _T], transfer: Transfer, peer: int, left: int) -> _T:
        """Calls; a failure of the wire becomes an error that names the peer and the bytes left."""
        try:
            return call()
        except torch.AcceleratorError:  # a kernel's fault, which the host hears of here
            raise
        except (RuntimeError, OSError) as error:
            if self.error is not None:
                raise self.error from error
            reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
            raise make_error(
                self.rank, transfer.kind, transfer.urgent, peer, left, reason
            ) from error


def _use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _wait_for_copy(event: torch.cuda.Event | None) -> Iterator[Ready]:
    if event is not None:
        yield partial(has_happened, event)
        event.synchronize()
