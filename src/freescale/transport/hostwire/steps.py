"""The two halves of a transfer: out to the wire, and in from it.

    out   device -> slot of the ring -> wire          a slot is copied to while the one before it is on the wire
    in    wire -> slot -> device

On CPU tensors, and over a wire that takes any memory, there are no slots: pieces go from tensor to
tensor.

A half is a generator. Before a step that may have to wait it yields what tells whether it would;
whoever runs it can ask and do something else meanwhile, or just go on and wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from freescale.streams import current_stream
from freescale.transport.api import TransportError
from freescale.transport.hostwire.gate import Gate
from freescale.transport.hostwire.pinned import Pinned
from freescale.transport.hostwire.transfer import Part, Round, Transfer, cut, recorded
from freescale.transport.hostwire.wires.gloo import Arriving, Sending, Wire
from freescale.transport.threads import wait_for_event

SLOTS = 8  # of a ring: some are copied to, some are on the wire, some are copied from
AHEAD = 3  # pieces that are expected before the first has come
LARGEST = 4 << 20  # bytes of a piece, and of a slot
URGENT_TIMES = 2  # as large as bulk's are pieces that need not give way
SMALL = 64 << 10  # bytes of a piece that is all latency

Ready = Callable[[], bool]
Piece = tuple[int, Tensor]  # peer, bytes


class TransferSteps:
    """Transfers of one channel, one after another; `error` is what ended it."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        routes: Sequence[Wire],
        ring: Pinned,
        gate: Gate,
        piece: int,
        seconds: float,
    ) -> None:
        self.rank, self.device, self.routes = rank, device, routes
        self.error: BaseException | None = None
        self.late = False  # whoever runs the halves has waited long enough
        self._gate, self._piece, self._seconds = gate, piece, seconds
        self._largest = min(LARGEST, URGENT_TIMES * piece)
        slot = ring.bytes.numel() // SLOTS
        assert not slot or self._largest <= slot, (piece, slot)
        cuda = device.type == "cuda"
        self._slots = ring.bytes.split(slot) if ring.bytes.numel() else ()
        self._into = (
            Pinned(SLOTS * self._largest, device)
            if cuda and any(wire.direct for wire in routes)
            else None
        )
        self._streams = (
            [torch.cuda.Stream(device, priority=-1) for _ in range(2)] if cuda else [None, None]
        )
        # what leaves from each slot, and to whom
        self._sent: list[list[tuple[Sending, int]]] = [[] for _ in self._slots]
        # copies to the device that may be under way
        self._landing: deque[tuple[Any, Arriving]] = deque()
        self._filled = 0  # slots, ever: out
        self._taken = 0  # slots of `_into`, ever

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            for wire in {id(wire): wire for wire in self.routes}.values():
                wire.close()

    def close(self) -> None:
        if self._into is not None:
            self._into.close()

    # ---- out

    def out(self, transfer: Transfer) -> Iterator[Ready]:
        yield from self._begun(transfer)
        transfer.ready(self._gate)
        left = transfer.size
        for round_ in transfer.out:
            if round_.after is not None:
                yield round_.after.landed.is_set
                self._landed(round_.after, transfer)
            direct: deque[tuple[int, int, Sending]] = deque()
            staged: deque[tuple[Any, int, list[Piece]]] = deque()
            for batch in self._batches(round_.parts, transfer):
                if not transfer.urgent:
                    yield self._gate.open
                    self._gate.give_way()
                if not self._by_slot(batch[0][0], transfer):
                    ((peer, piece),) = batch
                    if len(direct) >= AHEAD:
                        left = self._wait_sent(*direct.popleft(), left, transfer)
                    direct.append(
                        (
                            peer,
                            piece.numel(),
                            self._guarded(
                                self.routes[peer].send, transfer, peer, left, peer, piece
                            ),
                        )
                    )
                    continue
                yield from self._emptied(transfer, left)
                staged.append(self._fill(batch, transfer))
                if len(staged) > 2:
                    yield from _copied(staged[0][0])
                    left = self._post(*staged.popleft(), left, transfer)
            while staged:
                yield from _copied(staged[0][0])
                left = self._post(*staged.popleft(), left, transfer)
            while direct:
                left = self._wait_sent(*direct.popleft(), left, transfer)
        # Nothing is sent from the tensor any more: what is in slots is a copy.

    def has_slots(self, transfer: Transfer) -> bool:
        """Its first half would not wait for a peer."""
        count = sum(1 for round_ in transfer.out for _ in self._batches(round_.parts, transfer))
        slots = [number % SLOTS for number in range(self._filled, self._filled + min(count, SLOTS))]
        return count <= SLOTS and all(
            sending.ready() for slot in slots for sending, _ in self._sent[slot]
        )

    def _by_slot(self, peer: int, transfer: Transfer) -> bool:
        return transfer.cuda or not self.routes[peer].direct

    def _batches(self, parts: Sequence[Part], transfer: Transfer) -> Iterator[list[Piece]]:
        """Pieces that go together: through one slot if they go by slots, alone otherwise."""
        batch: list[Piece] = []
        size = 0
        for part in parts:
            for piece in self._pieces(part, transfer):
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

    def _emptied(self, transfer: Transfer, left: int) -> Iterator[Ready]:
        """All that left from the next slot has been read."""
        number = self._filled % SLOTS
        for sending, peer in self._sent[number]:
            yield sending.ready
            self._guarded(sending.wait, transfer, peer, left, self._patience())
        self._sent[number] = []

    def _fill(self, batch: list[Piece], transfer: Transfer) -> tuple[Any, int, list[Piece]]:
        """Copies the pieces to the next slot."""
        number = self._filled % SLOTS
        self._filled += 1
        begin, copies = 0, []
        with self._on(0):
            for peer, piece in batch:
                copy = self._slots[number][begin : begin + piece.numel()]
                copy.copy_(piece, non_blocking=True)
                copies.append((peer, copy))
                begin += -(-piece.numel() // 16) * 16  # aligned for every dtype
        return recorded(transfer.device, stream=self._streams[0]), number, copies

    def _post(
        self, copied: Any, number: int, copies: list[Piece], left: int, transfer: Transfer
    ) -> int:
        for peer, copy in copies:
            self._sent[number].append(
                (self._guarded(self.routes[peer].send, transfer, peer, left, peer, copy), peer)
            )
            left -= copy.numel()
        if transfer.urgent:
            self._gate.moved()
        return left

    def _wait_sent(
        self, peer: int, size: int, sending: Sending, left: int, transfer: Transfer
    ) -> int:
        self._guarded(sending.wait, transfer, peer, left, self._seconds)
        if transfer.urgent:
            self._gate.moved()
        return left - size

    # ---- in

    def into(self, transfer: Transfer) -> Iterator[Ready]:
        yield from self._begun(transfer)
        left = sum(part.bytes.numel() for round_ in transfer.into for part in round_.parts)
        for round_ in transfer.into:
            expected: deque[tuple[int, Tensor, Arriving]] = deque()
            for part in round_.parts:
                for piece in self._pieces(part, transfer):
                    if not transfer.urgent:
                        yield self._gate.open
                        self._gate.give_way()
                    if len(expected) >= AHEAD:
                        yield from self._land(*expected[0], left, transfer)
                        left -= expected.popleft()[1].numel()
                    expected.append(
                        (part.peer, piece, self._expect(part.peer, piece, transfer, left))
                    )
            while expected:
                yield from self._land(*expected[0], left, transfer)
                left -= expected.popleft()[1].numel()
            transfer.arrived = recorded(transfer.device, stream=self._streams[1])
            round_.landed.set()
        # This rank may turn to something else now, while a peer that still sends to others waits
        # for a slot that it has not freed.
        yield from self.settle()

    def settle(self, leave: int = 0) -> Iterator[Ready]:
        """All but some copies to the device have ended; where they came from is free."""
        while len(self._landing) > leave:
            yield from _copied(self._landing[0][0])
            self._landing.popleft()[1].free()

    def _expect(self, peer: int, piece: Tensor, transfer: Transfer, left: int) -> Arriving:
        wire, into = self.routes[peer], None
        if wire.direct:
            into = piece
            if transfer.cuda:
                assert self._into is not None
                for _ in self.settle(SLOTS - AHEAD - 1):  # its slots are used in turn
                    pass
                begin = self._taken % SLOTS * self._largest
                self._taken += 1
                into = self._into.bytes[begin : begin + piece.numel()]
        return self._guarded(wire.expect, transfer, peer, left, peer, piece.numel(), into)

    def _land(
        self, peer: int, piece: Tensor, arriving: Arriving, left: int, transfer: Transfer
    ) -> Iterator[Ready]:
        if not arriving.ready():
            # Nobody may have to wait for a slot of which this rank, itself waiting, has not said
            # that it read it.
            yield from self.settle()
            yield arriving.ready
        came = self._guarded(arriving.wait, transfer, peer, left, self._patience())
        # its slot is free at once: nothing waits for a copy of a few bytes
        if transfer.cuda and piece.numel() <= SMALL:
            with self._on(1):
                piece.copy_(
                    torch.empty(came.shape, dtype=came.dtype, pin_memory=True).copy_(came),
                    non_blocking=True,
                )
            yield from self.settle()
            arriving.free()
        else:
            if came.data_ptr() != piece.data_ptr():
                with self._on(1):
                    piece.copy_(came, non_blocking=True)
            self._landing.append((recorded(transfer.device, stream=self._streams[1]), arriving))
            yield from self.settle(2 if transfer.cuda else 0)
        if transfer.urgent:
            self._gate.moved()

    # ---- both

    def _begun(self, transfer: Transfer) -> Iterator[Ready]:
        """On the host: what waits in a stream can hold up other streams."""
        if transfer.begun is not None:
            yield transfer.begun.query
            wait_for_event(transfer.begun)

    def _on(self, half: int) -> AbstractContextManager[object]:
        stream = self._streams[half]
        return torch.cuda.stream(stream) if stream is not None else nullcontext()

    def _pieces(self, part: Part, transfer: Transfer) -> Sequence[Tensor]:
        size = part.bytes.numel()
        return (
            part.bytes.split(cut(size, self._largest if transfer.urgent else self._piece))
            if size
            else ()
        )

    def _patience(self) -> float:
        return 0.001 if self.late else self._seconds

    def _landed(self, round_: Round, transfer: Transfer) -> None:
        """Waits until another thread has received a round; its own waits are limited, and its
        failure ends this one."""
        while not round_.landed.wait(0.1):
            if self.error is not None:
                raise self.error
        if transfer.arrived is not None:
            with self._on(0):
                current_stream(self.device).wait_event(transfer.arrived)

    def _guarded(
        self, call: Callable[..., Any], transfer: Transfer, peer: int, left: int, *arguments: Any
    ) -> Any:
        try:
            return call(*arguments)
        except torch.AcceleratorError:  # a kernel's fault, which the host hears of here
            raise
        except (RuntimeError, OSError) as error:
            if self.error is not None:
                raise self.error from error
            what = f"{'urgent' if transfer.urgent else 'bulk'} exchange of {transfer.kind} failed"
            reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
            raise TransportError(
                f"rank {self.rank}: {what}: rank {peer} died or fell silent, {left:,} bytes "
                f"outstanding ({reason})"
            ) from error


def _copied(event: Any) -> Iterator[Ready]:
    if event is not None:
        yield event.query
        event.synchronize()
