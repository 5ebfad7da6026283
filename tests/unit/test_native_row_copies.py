"""Rows copied in C beside torch's indexing."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from freescale.embedding.host_tables import copies
from freescale.kernels.requests import native as row_copies


@pytest.fixture(params=["c", "torch"], autouse=True)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(row_copies, "fits", lambda *tensors: False)
    else:
        assert row_copies.fits(torch.zeros(1))
    return request.param


# rows of a few bytes, of no multiple of 16, so many that several threads copy, and so many that
# they are written past the caches where a processor can: aligned rows, and others
@pytest.mark.parametrize(
    "shape", [(50, 3), (50, 1), (50,), (9000, 129), (4000, 4, 33), (70_000, 8, 8), (70_000, 65)]
)
@pytest.mark.parametrize("threads", [1, 3, 100])
def test_equals_indexing(shape, threads, monkeypatch):
    monkeypatch.setattr(row_copies, "count_cores", lambda: threads)
    torch.manual_seed(0)
    source, to = torch.randn(shape), torch.randn(shape)
    rows, to_rows = (torch.randperm(shape[0])[: shape[0] // 2] for _ in range(2))
    count = len(rows)
    for into, out_of in ((to_rows, rows), (None, rows), (to_rows, None)):
        expected = to.clone()
        expected[slice(count) if into is None else into] = source[
            slice(count) if out_of is None else out_of
        ]
        found = to.clone()
        copies.copy_rows(found, into, source, out_of)
        assert torch.equal(found, expected)


def test_nothing_is_copied():
    to, none = torch.ones(3, 2), torch.zeros(0, dtype=torch.int64)
    copies.copy_rows(to, none, torch.zeros(3, 2), none)
    assert torch.equal(to, torch.ones(3, 2))


ROWS = torch.arange(20_000).flip(0)


def make_numbers(number):
    """A table, and room for another one."""
    source = torch.arange(20_000.0)[:, None].repeat(1, 64) + number
    return source, torch.empty_like(source)


def copy_backwards(source, found):
    """Whether the copy of the rows in the other order is that."""
    copies.copy_rows(found, None, source, ROWS)
    return found.numpy().tobytes() == source.numpy()[::-1].tobytes()


def test_several_at_a_time_share_the_threads(monkeypatch):
    monkeypatch.setattr(row_copies, "count_cores", lambda: 4)
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(lambda number: copy_backwards(*make_numbers(number)), range(60)))


def test_a_forked_process_has_threads_of_its_own(way, monkeypatch):
    if way == "torch":  # which does not promise it
        return
    monkeypatch.setattr(row_copies, "count_cores", lambda: 4)
    tables = [make_numbers(number) for number in range(5)]
    assert copy_backwards(*make_numbers(9))  # there are threads before
    child = os.fork()
    if not child:
        same = [copy_backwards(*each) for each in tables]
        others = len(os.listdir("/proc/self/task")) - 1
        os._exit(0 if all(same) and others == 3 else 1)
    until = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.05)
    assert ended == (child, 0), "the child hangs, has no threads, or its copy is another one"
