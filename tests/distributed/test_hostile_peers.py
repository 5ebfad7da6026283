"""A peer that names bytes it does not have ends the exchange, by an error that names it."""

from __future__ import annotations

import socket
import struct

import pytest
import torch
from helpers.ranks import gather_ranks, run_ranks

from freescale.transport.api import TransportError
from freescale.transport.hostwire.bindings import load_engine
from freescale.transport.hostwire.channel import (
    LARGEST,
    SLOTS,
    ChannelParts,
    Pinned,
    create_shared_file,
)
from freescale.transport.hostwire.engine import EngineChannel, EngineGate
from freescale.transport.hostwire.wires.shared import SharedWire

RING, SIZE = SLOTS * LARGEST, 1000
CPU = torch.device("cpu")
NONSENSE = {
    "beyond its ring": (struct.pack("<QQ", 1 << 46, SIZE), "names bytes"),
    "across the end of its ring": (struct.pack("<QQ", RING - SIZE + 1, SIZE), "names bytes"),
    "before its ring": (struct.pack("<QQ", (1 << 64) - 16, SIZE), "names bytes"),
    "another size": (struct.pack("<QQ", 0, 1 << 62), "ranks disagree on sizes"),
}


def _met(transport, message, answers=b""):
    """This rank exchanges with a peer that is not there: its messages wait in the sockets."""
    ring, theirs = (Pinned(RING, CPU, create_shared_file(RING)) for _ in range(2))
    (out, answering), (into, sending) = socket.socketpair(), socket.socketpair()
    sending.sendall(message)
    answering.sendall(answers)
    wire = SharedWire({1: out}, {1: into}, {1: theirs})
    sent, came = torch.zeros(2 * RING, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    library = load_engine()
    assert library is not None
    parts = ChannelParts(0, CPU, ring, LARGEST // 2, 60.0)
    channel = EngineChannel(parts, [wire], EngineGate(library, 0.001))
    laid = [([0, tensor.data_ptr()], [0, tensor.numel()]) for tensor in (sent, came)]
    error = ""
    try:
        channel.submit("rows", False, (sent, came), *laid[0], *laid[1]).wait()
    except TransportError as caught:
        error = str(caught)
    channel.close()
    return error


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_an_error_that_names_the_peer(what):
    message, reason = NONSENSE[what]
    (text,) = run_ranks(1, _met, message)
    assert text.startswith("rank 0: bulk exchange of rows failed: rank 1 ") and reason in text


def test_answers_beyond_the_pieces_that_were_sent_are_not_heard():
    """A peer that sends them loses what it has not read, and nothing else."""
    assert run_ranks(1, _met, struct.pack("<QQ", 0, SIZE), b"." * 4000) == [""]


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
