"""Opening shared memory between ranks of a machine: strangers are not let in, and nothing stays
open after a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from freescale.transport.hostwire.channel import Pinned, create_shared_file
from freescale.transport.hostwire.wires import shared

SIZE = 1 << 12
# Another user of the machine: reads the socket's name, which everybody can, and says that it is
# rank 1.
STRANGER = """
import os, socket, struct, sys
os.setuid(65534)
calling = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
calling.connect(b"\\0" + sys.argv[1].encode())
calling.settimeout(5)
print("in the queue", flush=True)
try:
    socket.send_fds(calling, [struct.pack("<IQ", 1, 4096)], [0])
    sys.exit(0 if calling.recv(1) == b"" else 3)
except (BrokenPipeError, ConnectionResetError):
    sys.exit(0)
"""


def _together(between=lambda names: None, size=2):
    """What `connect` gave to each of two ranks, threads of this process, or raised. `between`:
    called with both names."""
    names, met = [b""] * size, threading.Barrier(size, timeout=120)
    found: list[object] = [None] * size

    def rank_of(rank: int) -> None:
        file = create_shared_file(SIZE)
        ring = Pinned(SIZE, torch.device("cpu"), file)

        def gather(name: bytes) -> list[bytes]:
            names[rank] = name
            if met.wait() == 0:
                between(names)
            met.wait()
            return list(names)

        try:
            found[rank] = shared.connect(
                rank, [1 - rank], ring, file, torch.device("cpu"), gather, 5.0
            )
        except Exception as error:  # noqa: BLE001
            found[rank] = error
        os.close(file)
        if isinstance(found[rank], Exception):
            ring.close()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in():
    strangers = []

    def call(names):
        for name in names:
            command = [sys.executable, "-c", STRANGER, name[1:].decode()]
            strangers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        # they are in the queue before the ranks call each other
        assert [stranger.stdout.readline() for stranger in strangers] == ["in the queue\n"] * 2

    wires = _together(call)
    assert [stranger.wait(timeout=120) for stranger in strangers] == [0, 0]
    for stranger in strangers:
        stranger.stdout.close()
    for rank, wire in enumerate(wires):
        assert isinstance(wire, shared.SharedWire) and list(wire.rings) == [1 - rank], wire
        wire.close()


def test_nothing_stays_open_after_a_failure(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no memory")

    before = set(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(shared, "Pinned", refuse)  # that of the peer's ring
    found = _together()
    assert [str(error) for error in found] == ["no memory"] * 2
    assert set(Path("/proc/self/fd").iterdir()) - before == set()
