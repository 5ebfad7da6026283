"""What staged's threads free goes back to the system, and batches die with their step."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch

from freescale.batch import Jagged, SequenceBatch
from freescale.pipeline.agreement import PendingAgreement, Proposal
from freescale.pipeline.process_memory import trim_heap
from freescale.transport.local import LocalTransport

PIECE, PIECES = 100 << 10, 400  # below the size of blocks that glibc maps by themselves


def read_resident() -> int:
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="the heap is glibc's",
)
def test_holes_are_returned_beside_large_batches_only() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = []
    for _ in range(PIECES):  # a piece, and behind it a small block that lives on
        blocks.append((library.malloc(PIECE), library.malloc(4096)))
        ctypes.memset(blocks[-1][0], 1, PIECE)
    for piece, _ in blocks:
        library.free(piece)
    full = read_resident()
    assert not trim_heap(1 << 20)
    assert read_resident() > full - PIECE * PIECES // 2
    assert trim_heap(64 << 20)
    assert read_resident() < full - PIECE * PIECES // 2
    for _, small in blocks:
        library.free(small)


def test_an_agreement_does_not_keep_the_batches_it_was_made_from() -> None:
    def make() -> SequenceBatch:
        return SequenceBatch(
            sequences={"history": Jagged(torch.arange(3), torch.tensor([3]))},
            weights={"click": torch.ones(1)},
        )

    batch, before = make(), make()
    alive = weakref.ref(batch), weakref.ref(before)
    pending = PendingAgreement(Proposal(batch, None, before), LocalTransport())
    assert pending.wait().ready
    del batch, before
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
