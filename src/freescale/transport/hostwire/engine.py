"""A channel driven in C (csrc/engine.c): through memory that ranks of one machine share, and over
TCP streams between machines.

The thread that waits for a transfer drives it, both directions in turn, without Python's lock:
waking another thread takes longer than many a transfer.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_uint64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from freescale.streams import current_stream, new_stream, record_event, record_event_on
from freescale.transport.api import Sizes, TransportError
from freescale.transport.hostwire.bindings import Driver, EngineLibrary, ErrorCode
from freescale.transport.hostwire.channel import LARGEST, SLOTS, ChannelParts, Pinned, make_error
from freescale.transport.hostwire.wires.shared import SharedWire
from freescale.transport.hostwire.wires.tcp import TcpWire

# seconds that a thread polls before it naps; CPU ranks need the core for compute
_SPIN = {"cpu": 0.0, "cuda": 0.0003}
_REASONS = {
    ErrorCode.CLOSED: "the connection was closed",
    ErrorCode.TIMED_OUT: "the time ran out",
    ErrorCode.SIZE_MISMATCH: (
        "a piece of {:,} bytes arrived that was not expected: ranks disagree on sizes"
    ),
    ErrorCode.DEVICE: "the driver of the GPU refused, error {}",
    ErrorCode.OUTSIDE_RING: "it names bytes from {:,} on, which are outside its ring",
}
_PATIENCE = 2.0  # seconds that closing waits for a thread
# bytes of pieces that share a slot; a large piece leaves as soon as it is copied
_TOGETHER = 1 << 20
_INBOX = 1 << 20  # largest slot that a stream fills before it is copied to a GPU, in bytes
_INBOXES = 64 << 20  # all of them together
_WAITING = 4  # pieces that may wait in a stream of a slow network
_DRIVER_CALLS = (
    "cuMemcpyAsync",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuCtxSetCurrent",
)


def _load_driver() -> Driver:
    """With the current thread's context: torch's."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context = c_void_p()
    if cuda.cuCtxGetCurrent(byref(context)) or not context.value:
        raise RuntimeError("there is no CUDA context in this thread")
    calls = (ctypes.cast(getattr(cuda, name), c_void_p).value for name in _DRIVER_CALLS)
    return Driver(*calls, context.value)


class EngineGate:
    """Bulk traffic of a rank gives way to its urgent traffic, on all its channels (csrc/gate.h)."""

    def __init__(self, library: EngineLibrary, patience: float) -> None:
        self.library, self.handle = library, library.gate_new(patience)

    def __del__(self) -> None:
        self.library.gate_free(self.handle)


class EngineTransfer:
    """One transfer. The thread that waits for it drives it, and those before it."""

    def __init__(
        self, channel: EngineChannel, number: int, kind: str, urgent: bool, kept: tuple[object, ...]
    ) -> None:
        self._channel, self.number, self.kind, self.urgent = channel, number, kind, urgent
        self.kept = kept  # tensors and an event whose addresses C has
        self.arrived: torch.cuda.Event | None = None  # of the part that stays on this rank

    def wait(self) -> None:
        """Waits until all that travels is in place; work queued on the current stream afterwards
        sees the rest as well. Raises TransportError."""
        self._channel.drive_until(self)
        if self.arrived is not None:
            current_stream(self._channel.device).wait_event(self.arrived)


class EngineChannel:
    """A channel that the engine drives, over wires to all other ranks; a rank's share a gate."""

    def __init__(
        self, parts: ChannelParts, wires: Sequence[SharedWire | TcpWire], gate: EngineGate
    ) -> None:
        library, rank, device = gate.library, parts.rank, parts.device
        ring, slot = parts.ring, parts.slot
        self.rank, self.device, self._seconds = rank, device, parts.seconds
        self._library, self._wires, self._gate, self._ring = library, wires, gate, ring
        self._largest = {False: parts.piece, True: parts.largest}  # by urgency
        endpoints: dict[int, tuple[int, int, Pinned | None]] = {}
        for wire in wires:
            endpoints |= wire.endpoints()
        self._world = len(endpoints) + 1
        self._under_way: deque[EngineTransfer] = deque()
        self._error: BaseException | None = None
        self._inside = threading.Lock()  # while C has the channel: another thread may close it
        cuda = device.type == "cuda"
        self._streams = [new_stream(device, priority=-1) for _ in range(2)] if cuda else []
        # At least one for each stream: ranks whose slots hold unfinished pieces must not wait for
        # each other.
        streams = sum(theirs is None for *_, theirs in endpoints.values())
        inbox_slots = 2 * streams if cuda else 0
        inbox_bytes = max(64 << 10, min(_INBOX, _INBOXES // max(1, 2 * streams)))
        self._inbox = Pinned(inbox_slots * inbox_bytes, device)
        made = library.channel_new(
            *(self._world, rank),
            *(ring.bytes.data_ptr(), SLOTS, slot, min(_TOGETHER, slot or _TOGETHER)),
            *(self._inbox.bytes.data_ptr(), inbox_slots, inbox_bytes),
            *(gate.handle, _SPIN[device.type], byref(_load_driver()) if cuda else None),
            *([stream.cuda_stream for stream in self._streams] or (None, None)),
        )
        if not made:
            raise RuntimeError("no memory, or no events of the GPU, for a channel")
        self._handle: int | None = made
        for peer, (*sockets, theirs) in endpoints.items():
            # the engine checks what a peer names against this rank's ring
            assert theirs is None or theirs.bytes.numel() == ring.bytes.numel()
            address = None if theirs is None else theirs.bytes.data_ptr()
            library.channel_set_peer(made, peer, *sockets, address)
        for wire in wires:
            if isinstance(wire, TcpWire) and parts.piece < LARGEST:  # a slow network
                wire.limit_buffers(_WAITING // 2 * parts.piece)  # the kernel doubles it
        self._addresses, self._sizes = c_uint64 * self._world, c_int64 * self._world

    def all_to_all(
        self, kind: str, urgent: bool, tensor: Tensor, send: Sizes, output: Tensor, receive: Sizes
    ) -> EngineTransfer:
        """Sends the rows of tensor [sum(send), ...] to the ranks and receives
        output [sum(receive), ...], this rank's rows included; both in rank order. Raises
        TransportError if the channel has failed before."""
        row = tensor.element_size() * math.prod(tensor.shape[1:])
        out, into = _lay_out(tensor, send, row), _lay_out(output, receive, row)
        transfer = self.submit(kind, urgent, (tensor, output), *out, *into)
        if output.is_cuda:  # while the rest travels, which need not wait for it
            _select(output, receive, self.rank).copy_(_select(tensor, send, self.rank))
            transfer.arrived = record_event_on(output.device)
        return transfer

    def all_gather(self, kind: str, urgent: bool, tensor: Tensor, output: Tensor) -> EngineTransfer:
        """Sends tensor [...] to all ranks and receives output [world, ...], this rank's included.
        Raises TransportError if the channel has failed before."""
        if output.is_cuda:
            output[self.rank].copy_(tensor)
        size = tensor.numel() * tensor.element_size()
        out = [tensor.data_ptr()] * self._world, [size] * self._world
        into = _lay_out(output, [1] * self._world, size)
        return self.submit(kind, urgent, (tensor, output), *out, *into)

    def submit(
        self,
        kind: str,
        urgent: bool,
        tensors: tuple[Tensor, Tensor],
        out: Sequence[int],
        out_sizes: Sequence[int],
        into: Sequence[int],
        into_sizes: Sequence[int],
    ) -> EngineTransfer:
        """Starts a transfer from the first of `tensors` to the second. `out`, `into`: addresses
        [world] in each, with their bytes. On the host, the part that stays on this rank is copied
        too. `kind` is for error messages. TransportError if the channel failed or was closed."""
        if self._error is not None:
            raise self._error
        on_host = tensors[0].device.type == "cpu"
        inputs_ready = None if on_host else record_event()
        event = None if inputs_ready is None else inputs_ready.cuda_event
        arrays = (
            self._addresses(*out),
            self._sizes(*out_sizes),
            self._addresses(*into),
            self._sizes(*into_sizes),
        )
        arguments = (urgent, on_host, event, self._largest[urgent], *arrays)
        while (number := self._try_submit(arguments)) < 0:
            self.drive_until(self._under_way[0])
        transfer = EngineTransfer(self, number, kind, urgent, (*tensors, inputs_ready))
        self._under_way.append(transfer)
        return transfer

    def _try_submit(self, arguments: tuple[object, ...]) -> int:
        """The transfer's number; -1 if too many are under way."""
        with self._inside:
            if self._handle is None:
                raise self._error or TransportError(f"rank {self.rank}: this transport was closed")
            return int(self._library.channel_submit(self._handle, *arguments))

    def drive_until(self, last: EngineTransfer) -> None:
        """Drives all transfers up to `last`, in this thread. Raises TransportError."""
        with self._inside:
            if (
                self._error is None
                and self._handle is not None
                and self._library.channel_wait(self._handle, last.number, self._seconds)
            ):
                self._fail(last)
            while self._under_way and self._is_done(self._under_way[0]):
                self._under_way.popleft().kept = ()
            if self._error is not None and not self._is_done(last):
                raise self._error

    def _is_done(self, transfer: EngineTransfer) -> bool:
        if self._handle is None:
            return False
        return bool(self._library.channel_is_done(self._handle, transfer.number))

    def _fail(self, last: EngineTransfer) -> None:
        peer, cause = c_int(), c_int64()
        code = ErrorCode(self._library.channel_error(self._handle, byref(peer), byref(cause)))
        reason = _REASONS[code].format(cause.value)
        if code == ErrorCode.CLOSED and cause.value:
            reason += f", {os.strerror(cause.value)}"
        left = self._library.channel_bytes_left(self._handle)
        self._error = make_error(self.rank, last.kind, last.urgent, peer.value, left, reason)
        self._hang_up()  # ranks that wait for this one notice

    def close(self) -> bool:
        """Tells a thread that waits for a transfer to leave. Returns whether no thread uses its
        wires and memory any more; the wires stay open."""
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


def _lay_out(tensor: Tensor, sizes: Sequence[int], row: int) -> tuple[list[int], list[int]]:
    """Addresses and bytes of each part of the first dimension, whose rows have `row` bytes."""
    bytes_ = [size * row for size in sizes]
    return list(accumulate(bytes_[:-1], initial=tensor.data_ptr())), bytes_


def _select(tensor: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """The rank's part of the first dimension."""
    return tensor.narrow(0, sum(sizes[:rank]), sizes[rank])
