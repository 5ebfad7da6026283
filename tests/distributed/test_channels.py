"""Channels that are released are used again: connections, threads and memory do not grow, and what
failed is not used twice."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks

from freescale.ledger.ledger import Ledger, ThreadLedger
from freescale.transport.api import TransportError
from freescale.transport.channel_pool import ChannelPool, ExchangeCount
from freescale.transport.connect import connect
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport

from helpers.wires import WIRES, wired  # isort: skip


def _over(transport, wire, seconds=30.0):
    if wire == "collective":
        return connect("cpu", timeout=seconds, transport="collective")
    kind, shared = wired(wire)
    return HostwireTransport(
        "cpu",
        Ledger(),
        transport.group,
        transport.control,
        kind,
        shared=shared,
        timeout=timedelta(seconds=seconds),
    )


def _exchanged(channel, number):
    """In a thread of its own, as a lane does."""
    world, found = channel.world, []

    def work():
        sent = torch.full((world * 50_000,), 10 * number + channel.rank)
        came = channel.all_to_all(sent, [50_000] * world, [50_000] * world, "rows").wait()
        found.append(
            came.view(world, -1)[:, -1].tolist() == [10 * number + rank for rank in range(world)]
        )
        found.append(
            channel.gather_bytes(b"%d" % channel.rank) == [b"%d" % rank for rank in range(world)]
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    return found == [True, True]


def _used() -> tuple[int, int, int]:
    """Descriptors, threads, and bytes of shared memory that are mapped."""
    gc.collect()
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:freescale" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            mapped += end - begin
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


def _swept(transport, wire):
    made = _over(transport, wire)
    found, used = [], []
    for number in range(6):
        sides = [ThreadLedger(made.ledger, name) for name in ("ahead", "urgent", "input")]
        channels = [made.channel(side, urgent=side.name == "urgent") for side in sides]
        found.append(all(_exchanged(channel, number) for channel in channels))
        assert [channel.ledger for channel in channels] == sides and all(
            len(side.take()) >= 1 for side in sides
        )
        for channel in reversed(channels) if made.rank else channels:  # threads end when they end
            made.release(channel)
        made.gather_bytes(b"")
        time.sleep(0 if number else 0.2)
        end = time.monotonic() + 60.0
        while (
            number
            and any(now > first for now, first in zip(_used(), used[0], strict=True))
            and time.monotonic() < end
        ):  # a thread that was joined is gone a little later
            time.sleep(0.01)
        used.append(_used())
    made.close()
    return found, used


@pytest.mark.parametrize("wire", ["collective", *WIRES])
def test_a_sweep_takes_no_more_than_its_first_turn(wire):
    for found, used in run_ranks(2, _swept, wire):
        assert all(found) and all(
            now <= first for later in used[1:] for now, first in zip(later, used[0], strict=True)
        ), used


def _failed(transport, wire):
    made = _over(transport, wire, seconds=3.0)
    sides = [ThreadLedger(made.ledger, name) for name in ("first", "second", "third", "fourth")]
    lost, good = made.channel(sides[0]), made.channel(sides[1])
    assert _exchanged(good, 1)
    if made.rank == 0:  # it waits for what rank 1 never sends
        with pytest.raises(TransportError):
            lost.all_to_all(torch.zeros(4), [2, 2], [2, 2], "rows").wait()
    transport.gather_bytes(b"")  # whose patience is longer
    made.release(lost)
    made.release(good)
    again, new = made.channel(sides[2]), made.channel(sides[3])
    return again is good, new is lost, _exchanged(again, 2), _exchanged(new, 3)


@pytest.mark.parametrize("wire", ["collective", "shared memory", "tcp", "ucx: tcp"])
def test_a_channel_that_failed_on_one_rank_is_used_again_by_none(wire):
    assert run_ranks(2, _failed, wire) == [(True, False, True, True)] * 2


def _under_way(transport):
    made = _over(transport, "shared memory")
    channel = made.channel(ThreadLedger(made.ledger, "first"))
    handle = channel.all_to_all(torch.zeros(2), [1, 1], [1, 1], "rows")
    made.release(channel)  # before anybody waited for it
    other = made.channel(ThreadLedger(made.ledger, "second"))
    del handle
    return other is channel, _exchanged(other, 1)


def test_a_channel_with_something_under_way_is_not_used_again():
    assert run_ranks(2, _under_way) == [(False, True)] * 2


def test_a_channel_is_released_once_and_to_its_own_transport():
    channels = ChannelPool[str]()
    channels.add("one", False, ExchangeCount())
    assert channels.release("one")
    with pytest.raises(ValueError, match="released before"):
        channels.release("one")
    with pytest.raises(ValueError, match="another transport's"):
        channels.release("another")


def test_ranks_that_release_in_another_order_agree():
    ranks = [ChannelPool[str]() for _ in range(2)]
    for channels in ranks:
        for name, urgent in (("one", False), ("two", False), ("three", True)):
            channels.add(name, urgent, ExchangeCount(4, 4))
    for channels, order in zip(ranks, (("two", "one", "three"), ("three", "two")), strict=True):
        for name in order:  # the second has not released "one" yet
            assert channels.release(name)
    said: list[bytes] = []
    ranks[0].reuse(False, lambda payload: [said.append(payload) or payload])  # what it says
    ranks[0].release("one")
    both = [said[0], b'[{"1": 4, "2": 4}, []]']
    assert [channels.reuse(False, lambda _: both)[0] for channels in ranks] == ["two", "two"]
    assert [channels.reuse(False, lambda _: both)[0] for channels in ranks] == [None, None]
    assert [channels.reuse(True, lambda _: both)[0] for channels in ranks] == ["three", "three"]


def test_one_process_has_nothing_to_release():
    local = LocalTransport()
    local.release(local.channel(ThreadLedger(local.ledger, "ahead")))
