"""A peer that names bytes it does not have ends the exchange, by an error that names it: in C and
in Python."""

from __future__ import annotations

import socket
import struct

import pytest
import torch
from helpers.ranks import gather_ranks, run_ranks

from freescale.transport.api import TransportError
from freescale.transport.hostwire.bindings import load_engine
from freescale.transport.hostwire.engine import EngineChannel, EngineGate
from freescale.transport.hostwire.gate import Gate
from freescale.transport.hostwire.pinned import Pinned, create_shared_file
from freescale.transport.hostwire.python_channel import PythonChannel
from freescale.transport.hostwire.steps import LARGEST, SLOTS, ChannelParts
from freescale.transport.hostwire.transfer import Block, Round, Transfer
from freescale.transport.hostwire.wires.shared import SharedWire

RING, SIZE = SLOTS * LARGEST, 1000
CPU = torch.device("cpu")
NONSENSE = {
    "beyond its ring": (struct.pack("<QQ", 1 << 46, SIZE), "names bytes"),
    "across the end of its ring": (struct.pack("<QQ", RING - SIZE + 1, SIZE), "names bytes"),
    "before its ring": (struct.pack("<QQ", (1 << 64) - 16, SIZE), "names bytes"),
    "another size": (struct.pack("<QQ", 0, 1 << 62), "ranks disagree on sizes"),
}


def _met(transport, carrier, message, answers=b""):
    """This rank exchanges with a peer that is not there: what it would say waits in the sockets."""
    ring, theirs = (Pinned(RING, CPU, create_shared_file(RING)) for _ in range(2))
    (out, told), (into, telling) = socket.socketpair(), socket.socketpair()
    telling.sendall(message)
    told.sendall(answers)
    wire = SharedWire(ring, {1: out}, {1: into}, {1: theirs})
    sent, came = torch.zeros(2 * RING, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    parts = ChannelParts(0, CPU, ring, LARGEST // 2, 60.0)
    channel: EngineChannel | PythonChannel
    if carrier == "engine":
        found = load_engine()
        assert found is not None
        channel = EngineChannel(found, parts, [wire], EngineGate(found, 0.001))
        laid = [([0, tensor.data_ptr()], [0, tensor.numel()]) for tensor in (sent, came)]
        wait = lambda: channel.submit("rows", False, (sent, came), *laid[0], *laid[1]).wait()  # noqa: E731
    else:
        channel = PythonChannel("test", parts, [wire, wire], Gate(0.001), caller_drives=True)
        transfer = Transfer(
            "rows", [Round([Block(1, sent)])], [Round([Block(1, came)])], False, CPU
        )
        wait = lambda: channel.submit(transfer).wait()  # noqa: E731
    said = ""
    try:
        wait()
    except TransportError as error:
        said = str(error)
    channel.close()
    return said, dict(wire.sent), dict(wire.read)


@pytest.mark.parametrize("carrier", ["engine", "python"])
@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_an_error_that_names_the_peer(carrier, what):
    message, reason = NONSENSE[what]
    ((text, _, _),) = run_ranks(1, _met, carrier, message)
    assert text.startswith("rank 0: bulk exchange of rows failed: rank 1 ") and reason in text


@pytest.mark.parametrize("carrier", ["engine", "python"])
def test_answers_beyond_the_pieces_that_were_sent_are_not_heard(carrier):
    """Whoever says so loses what it has not read, and nothing else."""
    ((text, sent, read),) = run_ranks(1, _met, carrier, struct.pack("<QQ", 0, SIZE), b"." * 4000)
    assert text == "" and (carrier == "engine" or 8 < read[1] <= sent[1])


def _names_a_size(transport, size):
    gather = transport._gather
    if transport.rank == 1:
        transport._gather = lambda tensor: gather(
            torch.tensor([size]) if tensor.dtype == torch.int64 else tensor
        )
    with pytest.raises(TransportError) as caught:
        transport.gather_bytes(b"x")
    return str(caught.value)


@pytest.mark.parametrize("size", [-5, 1 << 60])
def test_the_length_of_a_control_message_is_checked(size):
    for error, text in gather_ranks(2, _names_a_size, size):
        assert error is None and f"rank 1 names a control message of {size:,} bytes" in text, (
            error,
            text,
        )
