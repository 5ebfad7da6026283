"""The wire between ranks of one machine: a slot of the sender's ring is memory that the receiver
can read. Nothing is copied on the way; on GPUs copy engines write and read the slot.

Every ordered pair of ranks has a Unix domain socket. The sender sends which bytes of its ring are
the next piece, the receiver answers once it has read them. A peer that dies closes its sockets.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress

import torch

from freescale.transport.api import Gather
from freescale.transport.hostwire.channel import Pinned
from freescale.transport.hostwire.wires.greeting import Caller, accept_peers

_HELLO = struct.Struct("<IQ")  # rank, size of its ring


class SharedWire:
    """By peer: `out` and `into`, sockets to send and receive on; `rings`, their memory."""

    path = "shared memory"

    def __init__(
        self,
        out: Mapping[int, socket.socket],
        into: Mapping[int, socket.socket],
        rings: Mapping[int, Pinned],
    ) -> None:
        self.out, self.into, self.rings = out, into, rings

    def endpoints(self) -> dict[int, tuple[int, int, Pinned]]:
        """By peer: the sockets to send and to receive on, and its ring."""
        return {
            peer: (self.out[peer].fileno(), self.into[peer].fileno(), self.rings[peer])
            for peer in self.out
        }

    def hang_up(self) -> None:
        """Wakes everyone who waits on either side; the sockets stay open."""
        for connection in (*self.out.values(), *self.into.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        for connection in (*self.out.values(), *self.into.values()):
            connection.close()
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
        names = gather(name)  # even if it failed: the others wait for it
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
        size, end = ring.bytes.numel(), time.monotonic() + seconds

        def find_rank(caller: Caller) -> int | None:
            peer, theirs = _HELLO.unpack(caller.hello)
            return peer if theirs == size and _is_ring(caller.files, size) else None

        calls = accept_peers(
            listener, _HELLO.size, {*peers}, end, f"rank {rank}", find_rank, _is_ours
        )
        for peer, caller in always.enter_context(closing(calls)):
            failed.enter_context(closing(caller))
            rings[peer] = Pinned(size, device, caller.files[0])
            failed.callback(rings[peer].close)
            caller.drop_files()
            caller.connection.settimeout(seconds)
            into[peer] = caller.connection
        failed.pop_all()
        return SharedWire(out, into, rings)


def _is_ring(files: list[int], size: int) -> bool:
    """Whether a caller sent memory of that size that it cannot shrink while it is read."""
    import fcntl

    try:
        return (
            bool(fcntl.fcntl(files[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
            and os.fstat(files[0]).st_size == size
        )
    except (OSError, IndexError):
        return False


def _is_ours(connection: socket.socket) -> bool:
    """Whether the caller is this user's or root's: everybody here sees the socket's name."""
    known = getattr(socket, "SO_PEERCRED", None)  # Linux
    if known is None:
        return True
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, known, struct.calcsize("3i"))
    )
    return user in (os.getuid(), 0)
