"""The wire between machines: a TCP connection for every pair of ranks.

A caller counts as a rank only if it sends the token that this rank gave out over the control group.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from freescale.transport.api import Gather
from freescale.transport.hostwire.wires.greeting import Caller, accept_peers

_HELLO = struct.Struct("<16sI")  # token of the called rank, number of the calling rank
_INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's control traffic uses the same interface
_REFUSED = b"! "
_ROOM = 1 << 20  # bytes that may wait to be read
_ADDRESS_OF = 0x8915  # ioctl SIOCGIFADDR


class TcpWire:
    """`streams`: by peer."""

    path = "tcp"

    def __init__(self, streams: Mapping[int, socket.socket]) -> None:
        self.streams = streams

    def endpoints(self) -> dict[int, tuple[int, int, None]]:
        """By peer: the sockets to send and to receive on, which are one stream; no ring."""
        return {
            peer: (stream.fileno(), stream.fileno(), None) for peer, stream in self.streams.items()
        }

    def limit_buffers(self, size: int) -> None:
        """Limits the bytes queued in a stream to about `size`: urgent traffic waits behind them."""
        for stream in self.streams.values():
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def probe(self, after: int | None, before: int | None, size: int, seconds: float) -> float:
        """Measures how long `size` bytes take to rank `after` while as many arrive from `before`.
        Those ranks probe as well. Raises RuntimeError or OSError."""
        begin = time.perf_counter()
        out, left = (
            memoryview(bytes(size if after is not None else 0)),
            size if before is not None else 0,
        )
        while out or left:
            waiting = select.poll()  # not select(), which takes no descriptor above 1,023
            wanted = {}  # by rank: of two, the one after is the one before
            if out and after is not None:
                wanted[after] = select.POLLOUT
            if left and before is not None:
                wanted[before] = wanted.get(before, 0) | select.POLLIN
            for peer, events in wanted.items():
                waiting.register(self.streams[peer], events)
            if not waiting.poll(1e3 * seconds):
                raise TimeoutError(f"no answer from ranks {before} and {after} in {seconds:.0f} s")
            with suppress(BlockingIOError):
                if out and after is not None:
                    out = out[self.streams[after].send(out) :]
            with suppress(BlockingIOError):
                if left and before is not None:
                    came = len(self.streams[before].recv(left))
                    if not came:
                        raise ConnectionResetError(f"rank {before} closed the connection")
                    left -= came
        return time.perf_counter() - begin

    def hang_up(self) -> None:
        """As `SharedWire.hang_up`."""
        for stream in self.streams.values():
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        for stream in self.streams.values():
            stream.close()


def find_own_address() -> str:
    """Where other machines reach this one: by GLOO_SOCKET_IFNAME, or the route to MASTER_ADDR."""
    if name := os.environ.get(_INTERFACE, "").split(",")[0]:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            try:
                answer = fcntl.ioctl(asking, _ADDRESS_OF, struct.pack("256s", name.encode()))
            except OSError as error:
                raise OSError(
                    f"interface {name!r} ({_INTERFACE}) has no IPv4 address: {error}"
                ) from error
        return socket.inet_ntoa(answer[20:24])
    target = os.environ.get("MASTER_ADDR", "")
    for family, _, _, _, where in (
        socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM) if target else ()
    ):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(where)  # sends nothing
            return str(asking.getsockname()[0])
    return "127.0.0.1"


def open_listener() -> socket.socket:
    address = find_own_address()
    listener = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)  # strangers must not fill the queue before the ranks call
    except OSError:
        listener.close()
        raise
    return listener


def connect(rank: int, peers: list[int], gather: Gather, seconds: float) -> TcpWire:
    """Connects ranks of different machines; the lower one of a pair calls. A collective of all
    ranks. OSError if a peer cannot be reached, or did not call within `seconds`."""
    token, end = secrets.token_bytes(16), time.monotonic() + seconds
    try:
        listener = open_listener()
    except OSError as error:
        gather(_REFUSED + str(error).encode())  # the others wait for it
        raise
    streams: dict[int, socket.socket] = {}
    with listener, ExitStack() as failed:
        address, port = listener.getsockname()[:2]
        answers = gather(f"{address} {port} {token.hex()}".encode())
        for peer, answer in enumerate(answers):
            if answer.startswith(_REFUSED):
                raise OSError(
                    f"rank {peer} cannot be called: {answer.removeprefix(_REFUSED).decode()}"
                )
        called = [answer.decode().rsplit(" ", 2) for answer in answers]
        for peer in (peer for peer in peers if peer > rank):
            where, number, key = called[peer]
            left = max(0.001, end - time.monotonic())
            try:
                streams[peer] = failed.enter_context(
                    socket.create_connection((where, int(number)), left)
                )
            except OSError as error:
                raise OSError(
                    f"rank {rank} at {address} does not reach rank {peer} at {where} "
                    f"({_INTERFACE} names an interface): {error}"
                ) from error
            streams[peer].sendall(_HELLO.pack(bytes.fromhex(key), rank))

        def find_rank(caller: Caller) -> int | None:
            given, peer = _HELLO.unpack(caller.hello)
            return peer if secrets.compare_digest(given, token) else None

        lower, where = {peer for peer in peers if peer < rank}, f"rank {rank} at {address}"
        for peer, caller in accept_peers(listener, _HELLO.size, lower, end, where, find_rank):
            caller.drop_files()
            streams[peer] = failed.enter_context(caller.connection)
        failed.pop_all()
    for stream in streams.values():
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Linux makes room for twice as many bytes and keeps it: the sender must not wait for the
        # reader.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _ROOM)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return TcpWire(streams)
