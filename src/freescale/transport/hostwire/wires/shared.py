"""The wire between ranks of one machine: a slot of the sender's ring is memory that the receiver
can read. Nothing is copied on the way; with GPUs the sender's copy engine writes the slot and the
receiver's reads it.

Every ordered pair of ranks has a socket (Unix domain). Over it the sender says which bytes of its
ring are the next piece, and the receiver, once it has read them, that it has. Who waits sleeps, and
a peer that dies closes its sockets.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress

import torch
from torch import Tensor

from freescale.transport.api import Gather
from freescale.transport.hostwire.pinned import Pinned
from freescale.transport.hostwire.wires.api import Endpoint
from freescale.transport.hostwire.wires.greeting import accept_callers

PIECE = struct.Struct("<QQ")  # where it begins in the ring, its size
READ = b"."  # a piece was read
_HELLO = struct.Struct("<IQ")  # rank, size of its ring


class _Sending:
    def __init__(self, wire: SharedWire, peer: int) -> None:
        self._wire, self._peer = wire, peer
        wire.sent[peer] += 1
        self._goal = wire.sent[peer]

    def ready(self) -> bool:
        wire, peer = self._wire, self._peer
        if wire.read[peer] < self._goal:
            with suppress(BlockingIOError):
                wire.out[peer].settimeout(0)
                answers = wire.out[peer].recv(wire.count_unread(peer))
                wire.read[peer] += len(answers)
                if not answers:
                    return True  # the peer has closed: the wait says so
        return wire.read[peer] >= self._goal

    def wait(self, seconds: float) -> None:
        wire, peer = self._wire, self._peer
        while wire.read[peer] < self._goal:  # pieces are read in the order in which they were sent
            wire.read[peer] += len(
                _receive_some(wire.out[peer], wire.count_unread(peer), time.monotonic() + seconds)
            )


class _Arriving:
    def __init__(self, wire: SharedWire, peer: int, size: int) -> None:
        self._wire, self._peer, self._size = wire, peer, size

    def ready(self) -> bool:
        waiting = select.poll()  # not select(), which takes no descriptor above 1,023
        waiting.register(self._wire.into[self._peer], select.POLLIN)
        return bool(waiting.poll(0))

    def wait(self, seconds: float) -> Tensor:
        begin, size = PIECE.unpack(
            _receive_exactly(self._wire.into[self._peer], PIECE.size, seconds)
        )
        if size != self._size:
            raise RuntimeError(
                f"a piece of {size:,} bytes came where {self._size:,} were "
                "expected: ranks disagree on sizes"
            )
        ring = self._wire.rings[self._peer].bytes
        if begin + size > ring.numel():
            raise RuntimeError(
                f"it names bytes {begin:,} to {begin + size:,} of a ring of {ring.numel():,}"
            )
        return ring[begin : begin + size]

    def free(self) -> None:
        with suppress(OSError):  # a peer that has closed does not wait for it
            self._wire.into[self._peer].sendall(READ)


class SharedWire:
    """`out`: sockets over which this rank sends, `into`: over which it receives, `rings`: the
    peers' memory. By peer."""

    path = "shared memory"
    direct = False

    def __init__(
        self,
        ring: Pinned,
        out: Mapping[int, socket.socket],
        into: Mapping[int, socket.socket],
        rings: Mapping[int, Pinned],
    ) -> None:
        self._ring, self.out, self.into, self.rings = ring, out, into, rings
        # pieces, by this rank and by the peer
        self.sent = dict.fromkeys(out, 0)
        self.read = dict.fromkeys(out, 0)

    def count_unread(self, peer: int) -> int:
        """Pieces that it may still answer: what it says beyond them is not heard."""
        return self.sent[peer] - self.read[peer]

    def send(self, peer: int, piece: Tensor) -> _Sending:
        begin = piece.data_ptr() - self._ring.bytes.data_ptr()
        sending = _Sending(self, peer)
        self.out[peer].sendall(PIECE.pack(begin, piece.numel()))
        return sending

    def expect(self, peer: int, size: int, into: Tensor | None) -> _Arriving:
        return _Arriving(self, peer, size)

    def endpoints(self) -> dict[int, Endpoint]:
        return {
            peer: Endpoint(self.out[peer].fileno(), self.into[peer].fileno(), self.rings[peer])
            for peer in self.out
        }

    def limit_buffers(self, size: int) -> None:
        """Sockets carry only messages about pieces."""

    def hang_up(self) -> None:
        for connection in (*self.out.values(), *self.into.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        for connection in (*self.out.values(), *self.into.values()):
            connection.close()

    def release(self) -> None:
        for ring in self.rings.values():
            ring.close()


def connect(
    rank: int,
    peers: list[int],
    ring: Pinned,
    file: int,
    device: torch.device,
    gather: Gather,
    seconds: float,
) -> SharedWire:
    """Connects the ranks of one machine, `peers` and this one. A collective of all ranks. `file` is
    the descriptor of this rank's ring; the copy engines of `device` read the peers' rings. OSError
    if a peer did not call within `seconds`, or there is no socket."""
    with ExitStack() as always, ExitStack() as failed:
        listener = always.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # abstract: leaves nothing behind
        name, refused = b"\0freescale-" + uuid.uuid4().hex.encode(), None
        try:
            listener.bind(name)
            # strangers must not fill the queue before the ranks call
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            name, refused = b"", error
        names = gather(name)  # also if it failed: the others wait for it
        if refused is not None:
            raise refused
        out: dict[int, socket.socket] = {}
        for peer in peers:
            out[peer] = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            out[peer].settimeout(seconds)
            out[peer].connect(names[peer])
            socket.send_fds(out[peer], [_HELLO.pack(rank, ring.bytes.numel())], [file])
        into: dict[int, socket.socket] = {}
        rings: dict[int, Pinned] = {}
        callers = always.enter_context(
            closing(
                accept_callers(
                    listener, _HELLO.size, len(peers), time.monotonic() + seconds, _is_ours
                )
            )
        )
        while len(into) < len(peers):
            try:
                caller = failed.enter_context(closing(next(callers)))
            except TimeoutError:
                raise TimeoutError(
                    f"ranks {[peer for peer in peers if peer not in into]} did not call rank {rank}"
                ) from None
            peer, size = _HELLO.unpack(caller.hello)
            if (
                peer not in peers
                or peer in into
                or not _is_ring(caller.files, size)
                or size != ring.bytes.numel()
            ):
                caller.close()
                continue
            rings[peer] = Pinned(size, device, caller.files[0])
            failed.callback(rings[peer].close)
            caller.drop_files()
            caller.connection.settimeout(seconds)
            into[peer] = caller.connection
        failed.pop_all()
        return SharedWire(ring, out, into, rings)


def _is_ring(files: list[int], size: int) -> bool:
    """Whether a caller sent memory of that size which it cannot take away again: to read what is
    gone would end this process."""
    import fcntl

    try:
        return (
            bool(fcntl.fcntl(files[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
            and os.fstat(files[0]).st_size == size
        )
    except (OSError, IndexError):
        return False


def _is_ours(connection: socket.socket) -> bool:
    """Whether who called is a process of this user, or of root: the name of the socket is seen by
    everybody on the machine."""
    known = getattr(socket, "SO_PEERCRED", None)  # Linux
    if known is None:
        return True
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, known, struct.calcsize("3i"))
    )
    return user in (os.getuid(), 0)


def _receive_some(connection: socket.socket, size: int, end: float) -> bytes:
    connection.settimeout(max(0.001, end - time.monotonic()))
    part = connection.recv(size)
    if not part:
        raise ConnectionResetError("the connection was closed")
    return part


def _receive_exactly(connection: socket.socket, size: int, seconds: float) -> bytes:
    data, end = b"", time.monotonic() + seconds
    while len(data) < size:
        data += _receive_some(connection, size - len(data), end)
    return data
