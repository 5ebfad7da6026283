"""Callers at a rank's socket: silent ones hold nobody up, and ranks meet beside any number of
them."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from freescale.transport.hostwire.channel import Pinned, create_shared_file
from freescale.transport.hostwire.wires import greeting, shared, tcp

SIZE = 1 << 12


def _met(connect, between):
    """What `connect(rank, gather)` gave to each of two ranks, threads of this process, or raised.
    `between`: called with what they gathered, before any of them goes on."""
    said, met, found = [b"", b""], threading.Barrier(2, timeout=120), [None, None]

    def rank_of(rank: int) -> None:
        def gather(what: bytes) -> list[bytes]:
            said[rank] = what
            if met.wait() == 0:
                between(list(said))
            met.wait()
            return list(said)

        try:
            found[rank] = connect(rank, gather)
        except Exception as error:  # noqa: BLE001
            found[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    return found


def _by_stream(rank, gather):
    return tcp.connect(rank, [1 - rank], gather, 120.0)


def _by_memory(rank, gather):
    file = create_shared_file(SIZE)
    ring = Pinned(SIZE, torch.device("cpu"), file)
    try:
        return shared.connect(rank, [1 - rank], ring, file, torch.device("cpu"), gather, 120.0)
    finally:
        os.close(file)


def _called(text: bytes) -> socket.socket:
    if text.startswith(b"\0"):
        calling = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        calling.connect(text)
        return calling
    address, port, _ = text.decode().rsplit(" ", 2)
    return socket.create_connection((address, int(port)), 60.0)


@pytest.mark.parametrize("connect", [_by_stream, _by_memory])
def test_callers_that_say_nothing_hold_nobody_up(connect, monkeypatch):
    monkeypatch.setattr(
        greeting, "_GREETING_SECONDS", 600.0
    )  # none of them is sent away for its silence
    before = set(Path("/proc/self/fd").iterdir())
    with ExitStack() as strangers:

        def call(texts):
            for text in (*texts * 100, *texts * 100):  # more than are heard at a time
                strangers.enter_context(_called(text))

        wires = _met(connect, call)
        for rank, wire in enumerate(wires):
            assert not isinstance(wire, Exception), wire
            assert list(wire.streams if connect is _by_stream else wire.into) == [1 - rank]
            wire.close()
    assert set(Path("/proc/self/fd").iterdir()) - before == set()


def _file(size=SIZE, sealed=True):
    file = create_shared_file(size) if sealed else os.memfd_create("unsealed")
    os.ftruncate(file, size)
    return file


# What callers of the same user say that are no rank of this run: (rank, size, file).
NO_RANKS = [
    (7, SIZE, _file),
    (0, 1 << 50, _file),
    (1, 1 << 50, _file),
    (0, SIZE, lambda: _file(sealed=False)),
    (1, SIZE, lambda: 1),
]


def test_a_ring_that_is_none_is_not_mapped():
    """Memory that its owner could take away again, of another size, or no memory at all."""
    with ExitStack() as strangers:

        def call(texts):
            for text in texts:
                for rank, size, made in NO_RANKS:
                    calling, file = strangers.enter_context(_called(text)), made()
                    socket.send_fds(calling, [struct.pack("<IQ", rank, size)], [file])
                    if file > 2:
                        os.close(file)

        for rank, wire in enumerate(_met(_by_memory, call)):
            assert isinstance(wire, shared.SharedWire) and list(wire.rings) == [1 - rank], wire
            wire.close()


def test_who_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(greeting, "_GREETING_SECONDS", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 60.0) as calling,
    ):
        with pytest.raises(TimeoutError):
            next(greeting.accept_callers(listener, 4, 1, time.monotonic() + 0.3))
        assert calling.recv(1) == b""


def test_what_comes_in_parts_is_heard():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 60.0) as calling,
    ):
        calling.sendall(b"he")
        threading.Timer(0.1, calling.sendall, [b"llo"]).start()
        caller = next(greeting.accept_callers(listener, 4, 1, time.monotonic() + 60.0))
        assert caller.hello == b"hell"
        caller.close()
