"""A channel whose transfers are carried in C (csrc/engine.c), without Python's lock: in memory that
ranks of one machine share, and on streams between machines.

The thread that waits carries, as with `CallerDriven`. In Python a transfer keeps the interpreter, which
the main thread then lacks for launching kernels; here only building the call does. Where there is
no engine (bindings.py), channel.py runs.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from freescale.streams import current_stream, record_event
from freescale.transport.api import TransportError
from freescale.transport.hostwire.bindings import Driver, EngineLibrary, ErrorCode
from freescale.transport.hostwire.pinned import Pinned
from freescale.transport.hostwire.steps import LARGEST, SLOTS, URGENT_TIMES
from freescale.transport.hostwire.wires.shared import SharedWire
from freescale.transport.hostwire.wires.tcp import TcpWire

# seconds that who waits looks around before it naps; a CPU has other things to do
_AWAKE = {"cpu": 0.0, "cuda": 0.0003}
_REASONS = {
    ErrorCode.CLOSED: "the connection was closed",
    ErrorCode.TIMED_OUT: "the time ran out",
    ErrorCode.SIZE_MISMATCH: (
        "a piece of {:,} bytes came that was not expected: ranks disagree on sizes"
    ),
    ErrorCode.DEVICE: "the driver of the GPU refused, error {}",
    ErrorCode.OUTSIDE_RING: "it names bytes from {:,} on, which are outside its ring",
}
_PATIENCE = 2.0  # seconds that closing waits for a thread
# bytes of pieces that share a slot: what is large leaves as soon as it is copied
_TOGETHER = 1 << 20
_INBOX = 1 << 20  # bytes of a slot that a stream fills before they are copied to a GPU, at most
_INBOXES = 64 << 20  # of all of them
_WAITING = 4  # pieces, that may wait in a stream of a slow network


def _driver() -> Driver:
    """Of the current thread's context: torch's."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context = c_void_p()
    if cuda.cuCtxGetCurrent(byref(context)) or not context.value:
        raise RuntimeError("there is no CUDA context in this thread")
    names = (
        "cuMemcpyAsync",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventCreate",
        "cuEventDestroy_v2",
        "cuCtxSetCurrent",
    )
    return Driver(
        *(ctypes.cast(getattr(cuda, name), c_void_p).value for name in names), context.value
    )


class EngineGate:
    """As `gate.Gate`, for the channels of a rank."""

    def __init__(self, library: EngineLibrary, patience: float) -> None:
        self._library, self.handle = library, library.gate_new(patience)

    def __del__(self) -> None:
        self._library.gate_free(self.handle)


class Carry:
    """One transfer. Whoever waits for it carries it, and those before it."""

    def __init__(
        self, channel: EngineChannel, number: int, kind: str, urgent: bool, kept: tuple[object, ...]
    ) -> None:
        self._channel, self.number, self.kind, self.urgent = channel, number, kind, urgent
        self.kept = kept  # tensors and an event that C has the addresses of
        self.arrived: torch.cuda.Event | None = None  # of what does not travel

    def wait(self) -> None:
        """Until the result is in its place, but for what `arrived` tells of: that is so for the
        current stream."""
        self._channel.carry(self)
        if self.arrived is not None:
            current_stream(self._channel.device).wait_event(self.arrived)


class EngineChannel:
    def __init__(
        self,
        library: EngineLibrary,
        rank: int,
        device: torch.device,
        wires: Sequence[SharedWire | TcpWire],
        ring: Pinned,
        gate: EngineGate,
        piece: int,
        seconds: float,
    ) -> None:
        """`ring`: SLOTS slots. `piece`: the largest, in bytes."""
        self.rank, self.device, self._seconds = rank, device, seconds
        self._library, self._wires, self._gate, self._ring = library, wires, gate, ring
        self._largest = {False: piece, True: min(LARGEST, URGENT_TIMES * piece)}  # by urgency
        rings = {peer: wire for wire in wires if isinstance(wire, SharedWire) for peer in wire.out}
        streams = {
            peer: stream
            for wire in wires
            if isinstance(wire, TcpWire)
            for peer, stream in wire.streams.items()
        }
        self._world = len(rings) + len(streams) + 1
        self._under_way: deque[Carry] = deque()
        self._error: BaseException | None = None
        self._inside = threading.Lock()  # while C has the channel: another thread may close it
        cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)] if cuda else []
        slot = ring.bytes.numel() // SLOTS
        assert not slot or self._largest[True] <= slot, (piece, slot)
        # One for each stream at least: ranks whose slots hold beginnings of others' pieces must not
        # wait for each other.
        slots, size = (
            2 * len(streams) if cuda else 0,
            max(64 << 10, min(_INBOX, _INBOXES // max(1, 2 * len(streams)))),
        )
        self._inbox = Pinned(slots * size, device)
        made = self._library.channel_new(
            *(
                self._world,
                rank,
                ring.bytes.data_ptr(),
                SLOTS,
                slot,
                min(_TOGETHER, slot or _TOGETHER),
                self._inbox.bytes.data_ptr(),
                slots,
                size,
            ),
            *(gate.handle, _AWAKE[device.type], byref(_driver()) if cuda else None),
            *([stream.cuda_stream for stream in self._streams] or (None, None)),
        )
        if not made:
            raise RuntimeError("no memory, or no events of the GPU, for a channel")
        self._handle: int | None = made
        for peer, shared in rings.items():
            out, into = shared.out[peer].fileno(), shared.into[peer].fileno()
            theirs = shared.rings[peer].bytes
            assert theirs.numel() == ring.bytes.numel(), (
                "rings are of one size: what a peer names is checked against it"
            )
            self._library.channel_set_peer(made, peer, out, into, theirs.data_ptr())
        for peer, stream in streams.items():
            self._library.channel_set_peer(made, peer, stream.fileno(), stream.fileno(), None)
        for wire in wires:
            # what is urgent waits for less than a few milliseconds
            if isinstance(wire, TcpWire) and piece < LARGEST:
                wire.limit(_WAITING // 2 * piece)  # the kernel doubles it
        self._addresses, self._sizes = c_uint64 * self._world, c_int64 * self._world

    def submit(
        self,
        kind: str,
        urgent: bool,
        tensors: tuple[Tensor, Tensor],
        out: Sequence[int],
        out_sizes: Sequence[int],
        into: Sequence[int],
        into_sizes: Sequence[int],
    ) -> Carry:
        """Addresses and sizes in bytes, by rank, inside `tensors`: what is sent and what is
        received into."""
        if self._error is not None:
            raise self._error
        host = tensors[0].device.type == "cpu"
        begun = None if host else record_event()
        event = None if begun is None else begun.cuda_event
        arrays = (
            self._addresses(*out),
            self._sizes(*out_sizes),
            self._addresses(*into),
            self._sizes(*into_sizes),
        )
        arguments = (self._handle, urgent, host, event, self._largest[urgent], *arrays)
        while (number := self._submitted(arguments)) < 0:
            self.carry(self._under_way[0])
        carry = Carry(self, number, kind, urgent, (*tensors, begun))
        self._under_way.append(carry)
        return carry

    def _submitted(self, arguments: tuple[object, ...]) -> int:
        """Its number; -1 if there are too many."""
        with self._inside:
            if self._handle is None:
                raise self._error or TransportError(f"rank {self.rank}: this transport was closed")
            return self._library.channel_submit(*arguments)

    def carry(self, last: Carry) -> None:
        with self._inside:
            if (
                self._error is None
                and self._handle is not None
                and self._library.channel_wait(self._handle, last.number, self._seconds)
            ):
                self._fail(last)
            while self._handle is not None and self._under_way and self._done(self._under_way[0]):
                self._under_way.popleft().kept = ()
            if self._error is not None and (self._handle is None or not self._done(last)):
                raise self._error

    def _done(self, carry: Carry) -> bool:
        return bool(self._library.channel_is_done(self._handle, carry.number))

    def _fail(self, last: Carry) -> None:
        peer, cause = c_int(), c_int64()
        code = ErrorCode(self._library.channel_error(self._handle, byref(peer), byref(cause)))
        reason = _REASONS[code].format(cause.value)
        if code == ErrorCode.CLOSED and cause.value:
            reason += f", {os.strerror(cause.value)}"
        what = f"{'urgent' if last.urgent else 'bulk'} exchange of {last.kind} failed"
        left = self._library.channel_bytes_left(self._handle)
        self._error = TransportError(
            f"rank {self.rank}: {what}: rank {peer.value} died or fell silent, {left:,} bytes "
            f"outstanding ({reason})"
        )
        self._hang_up()  # whoever waits for this rank hears of it

    def close(self) -> bool:
        """Whether nobody uses its wires and memory any more: a thread that waits for a transfer is
        told to leave."""
        if self._handle is None:
            return True
        self._library.channel_stop(self._handle)
        self._hang_up()
        if not self._inside.acquire(timeout=_PATIENCE):
            return False
        try:
            for stream in self._streams:
                stream.synchronize()
            if self._error is None:
                self._error = TransportError(f"rank {self.rank}: this transport was closed")
            self._library.channel_free(self._handle)
            self._handle = None
            self._inbox.close()
        finally:
            self._inside.release()
        return True

    def _hang_up(self) -> None:
        for wire in self._wires:
            wire.hang_up()
