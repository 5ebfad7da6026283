"""Collectives against their definition, clocks of different machines, and ranks that fall
silent."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks

from freescale.ledger.ledger import Ledger
from freescale.transport import process_group
from freescale.transport.local import LocalTransport
from freescale.transport.process_group import ProcessGroupTransport


def _all_to_all(transport, dtype, width):
    """Rank r sends to rank q the values 100 r + 10 q + i, (r + 2 q) % 4 of them: zeros included."""
    rank, world = transport.rank, transport.world
    size = lambda source, target: (source + 2 * target) % 4  # noqa: E731
    send = [size(rank, other) for other in range(world)]
    receive = [size(other, rank) for other in range(world)]

    def rows(source, target):
        values = torch.arange(size(source, target)) + 100 * source + 10 * target
        return values[:, None].expand(-1, width).to(dtype)

    out = torch.cat([rows(rank, other) for other in range(world)]).contiguous()
    got = transport.all_to_all(out, send, receive, "rows").wait()
    assert (
        torch.equal(got, torch.cat([rows(other, rank) for other in range(world)]))
        and got.dtype == dtype
    )
    return True


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_to_all_with_uneven_splits(world):
    assert all(run_ranks(world, _many))


def _many(transport):
    cases = ((torch.float32, 3), (torch.float64, 1), (torch.int32, 2), (torch.int64, 1))
    results = [_all_to_all(transport, dtype, width) for dtype, width in cases]
    gathered = transport.all_gather(torch.full((2,), float(transport.rank)), "counts").wait()
    assert torch.equal(gathered, torch.arange(transport.world).float()[:, None].expand(-1, 2))
    summed = transport.all_reduce(torch.full((3,), 1.0 + transport.rank), "dense").wait()
    assert summed.tolist() == [sum(range(1, transport.world + 1))] * 3
    payloads = [b"x" * (7 * rank) for rank in range(transport.world)]  # rank 0 has nothing to say
    assert transport.gather_bytes(payloads[transport.rank]) == payloads
    return all(results)


def test_one_process_is_the_identity():
    local = LocalTransport()
    tensor = torch.randn(3, 2)
    assert local.all_to_all(tensor, [3], [3], "rows").wait() is tensor
    assert torch.equal(local.all_gather(tensor, "rows").wait(), tensor[None])
    assert local.all_reduce(tensor, "dense").wait() is tensor
    assert local.gather_bytes(b"a") == [b"a"]


def _bytes_counted(transport):
    transport.ledger.begin_step(0)
    rank = transport.rank
    send = [5, 2] if rank == 0 else [1, 4]
    receive = [5, 1] if rank == 0 else [2, 4]
    transport.all_to_all(torch.zeros(sum(send), 3), send, receive, "rows").wait()
    transport.ledger.end_step()
    (record,) = transport.ledger.drain()
    return record["collectives"][0][:3]


def test_bytes_that_stay_are_not_counted():
    assert run_ranks(2, _bytes_counted) == [["rows", 2 * 12, 1 * 12], ["rows", 1 * 12, 2 * 12]]


SHIFT = 3_000_000_000  # nanoseconds by which each further rank's clock is ahead


def _other_machines(transport):
    real = time.perf_counter_ns
    process_group.time = type(
        "clock", (), {"perf_counter_ns": staticmethod(lambda: real() + transport.rank * SHIFT)}
    )
    gather = transport.gather_bytes
    transport.gather_bytes = lambda payload: gather(b"machine %d" % min(transport.rank, 1))
    return transport.clock_offsets()


def test_clocks_of_other_machines_are_compared():
    """Ranks 1 and 2 are on a second machine; their clocks are 3 and 6 seconds ahead."""
    for offsets, residuals in run_ranks(3, _other_machines):
        assert offsets[0] == 0 and residuals[0] == 0
        for rank in (1, 2):
            assert 0 < residuals[rank] < 50_000_000
            assert abs(offsets[rank] + rank * SHIFT) <= residuals[rank]


def test_one_machine_has_one_clock():
    assert run_ranks(2, _clocks) == [([0, 0], [0, 0])] * 2


def _clocks(transport):
    return transport.clock_offsets()


def _silent(transport, kind):
    group = dist.new_group(timeout=timedelta(seconds=3))
    short = ProcessGroupTransport("cpu", Ledger(), group=group, control=group)
    if transport.rank == 1:
        transport.gather_bytes(b"")  # silent until rank 0 has its error
        return None
    begin = time.monotonic()
    with pytest.raises(Exception, match="fell silent") as caught:
        if kind == "tensor":
            short.all_to_all(torch.zeros(2), [1, 1], [1, 1], "ids").wait()
        else:
            short.gather_bytes(b"hello")
    seconds = time.monotonic() - begin
    transport.gather_bytes(b"")
    return type(caught.value).__name__, seconds


@pytest.mark.parametrize("kind", ["tensor", "control"])
def test_a_silent_rank_is_an_error_after_the_timeout(kind):
    (name, seconds), _ = run_ranks(2, _silent, kind)
    assert name == "TransportError" and seconds > 2
