"""What several threads read of a memory file is the whole; reads into a GPU are in tests/gpu."""

from __future__ import annotations

import os

import pytest
import torch

from freescale.kernels.checksums.native import as_bytes
from freescale.train.state import file_reads
from freescale.train.state.file_reads import FileReads
from freescale.train.state.memory import write_segment

PLACE = 64


@pytest.fixture
def reads(monkeypatch):
    monkeypatch.setattr(file_reads, "_PIECE", 64)
    monkeypatch.setattr(file_reads, "count_cores", lambda: 3)
    made = FileReads()
    yield made
    made.close()


def write(value):
    file = os.memfd_create("test")
    os.pwrite(file, as_bytes(value).data, PLACE)
    return file


@pytest.mark.parametrize("shape", [(), (0,), (8,), (33, 5), (1, 64), (200,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_pieces_are_the_whole(reads, shape, dtype):
    """Of the host, and as for a GPU: through few pieces, used again and again."""
    for _ in range(2):
        source = torch.randint(0, 2, shape).to(dtype)
        file, found = write(source), [torch.ones_like(source) for _ in range(2)]
        reads.read(file, PLACE, found[0])
        reads.read_in_pieces(file, PLACE, found[1].view(-1).view(torch.uint8))
        assert all(torch.equal(to, source) for to in found)
        os.close(file)


def test_a_single_number_is_read_whatever_its_stride_is(reads):
    file, rows = write(torch.ones(1)), torch.zeros(3, 2)
    reads.read(file, PLACE, rows[:1, 1])
    assert rows.tolist() == [[0, 1], [0, 0], [0, 0]]
    os.close(file)


def test_a_file_that_is_too_short_is_said(reads):
    file = write(torch.ones(3))
    for read in (reads.read, reads.read_in_pieces):
        with pytest.raises(OSError, match="ends at byte 76"):
            read(file, PLACE, torch.empty(100, dtype=torch.uint8))
    os.close(file)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_of_a_segment_is_copied_where_it_belongs(reads, turned, dtype):
    """Also where its memory is another one."""
    source = torch.rand(7, 5)
    segment = write_segment({}, {"before": torch.ones(3), "rows": source})
    to = torch.zeros(5, 7, dtype=dtype).t() if turned else torch.zeros(7, 5, dtype=dtype)
    segment.copy("rows", to, reads)
    assert torch.equal(to, source.to(dtype))
    segment.close()
