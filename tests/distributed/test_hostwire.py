"""HostwireTransport against the definition of its collectives, over every wire; ranks that are
slow, silent or dead; urgent and bulk."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import gather_ranks, run_ranks

from freescale.ledger.ledger import Ledger, ThreadLedger
from freescale.transport.api import TransportError
from freescale.transport.choice import choose_transport
from freescale.transport.hostwire import opening, ucx_channel
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.hostwire.ucx_channel import Gate
from freescale.transport.hostwire.wires import tcp

from helpers.wires import WIRES, wired  # isort: skip


def hostwire(transport, wire, seconds=60.0):
    kind, shared = wired(wire)
    limit = timedelta(seconds=seconds)
    return HostwireTransport(
        "cpu", Ledger(), transport.group, transport.control, kind, shared=shared, timeout=limit
    )


def bytes_of(source, target, number, size):
    """What a rank sends to another: known to both."""
    return torch.arange(size, dtype=torch.int64) * 7 + source * 1_000_003 + target * 10_007 + number


DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool)


def _mixed(transport, wire, messages, delays):
    """Messages of all sizes on two channels at once, up to three under way on each, ranks held up
    at random."""
    wire = hostwire(transport, wire)
    channels = [
        wire.channel(ThreadLedger(wire.ledger, name), urgent=name == "urgent")
        for name in ("bulk", "urgent")
    ]
    threads, errors = [], []

    def talk(channel, seed):
        try:
            _exchange(
                channel,
                messages,
                random.Random(seed),
                random.Random(1000 * seed + transport.rank) if delays else None,
            )
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    for seed, channel in enumerate(channels):
        threads.append(threading.Thread(target=talk, args=(channel, seed)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    path = wire.describe_path()
    wire.close()
    assert not errors, errors
    return path


def _exchange(channel, messages, draw, delay):
    rank, world = channel.rank, channel.world
    under_way = []
    for number in range(messages):
        large = draw.random() < 0.02
        sizes = [
            [draw.choice((0, 0, 1, 3, 50, 2000, 300_000 if large else 40)) for _ in range(world)]
            for _ in range(world)
        ]
        dtype, width = draw.choice(DTYPES), draw.choice((1, 3))
        out = torch.cat([bytes_of(rank, to, number, sizes[rank][to]) for to in range(world)])
        into = torch.cat([bytes_of(of, rank, number, sizes[of][rank]) for of in range(world)])
        shaped = [ids[:, None].expand(-1, width).to(dtype).contiguous() for ids in (out, into)]
        if delay is not None and delay.random() < 0.01:
            time.sleep(delay.random() * 0.02)
        receive = [sizes[of][rank] for of in range(world)]
        under_way.append((shaped[1], channel.all_to_all(shaped[0], sizes[rank], receive, "rows")))
        while len(under_way) > 3 or (under_way and number == messages - 1):
            expected, handle = under_way.pop(0)
            got = handle.wait()
            assert got.dtype == expected.dtype and torch.equal(got, expected), (rank, number)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("world", "messages"), [(1, 20), (2, 600), (3, 400), (4, 200)])
def test_mixed_messages(wire, world, messages):
    """Over each wire more than 10,000 messages between pairs of ranks."""
    for path in run_ranks(world, _mixed, wire, messages, True, timeout=200):
        assert world == 1 or path.endswith(wire)


def _gathered(transport, wire):
    wire = hostwire(transport, wire)
    for count in (0, 1, 100, 70_000, 600_001):
        mine = torch.arange(count, dtype=torch.int32) + 7 * wire.rank
        got = wire.all_gather(mine, "rows").wait()
        assert torch.equal(
            got,
            torch.stack(
                [torch.arange(count, dtype=torch.int32) + 7 * rank for rank in range(wire.world)]
            ),
        )
    summed = wire.all_reduce(torch.full((3,), 1.0 + wire.rank), "dense")
    assert summed.wait().tolist() == [sum(range(1, wire.world + 1))] * 3
    assert summed.path == (wire.describe_path() if wire.world == 2 else "gloo")
    whole = torch.arange(300_000) * (1 + wire.rank)  # more than two ranks sum by themselves
    summed = wire.all_reduce(whole, "dense")
    assert summed.wait() is whole and summed.path == "gloo"
    assert torch.equal(whole, torch.arange(300_000) * sum(range(1, wire.world + 1)))
    wire.close()
    return True


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_gather(wire, world):
    assert all(run_ranks(world, _gathered, wire))


def _counted(transport, wire):
    wire = hostwire(transport, wire)
    wire.ledger.begin_step(0)
    send, receive = ([5, 2], [5, 1]) if wire.rank == 0 else ([1, 4], [2, 4])
    handle = wire.all_to_all(torch.zeros(sum(send), 3), send, receive, "rows")
    handle.wait(host=True)
    wire.all_gather(torch.zeros(2), "counts").wait()
    wire.ledger.end_step()
    (record,) = wire.ledger.drain()
    path = wire.describe_path()
    wire.close()
    assert handle.bytes == record["collectives"][0][1] and handle.path == path
    return [entry[:3] for entry in record["collectives"]], record["paths"]


def _two_machines(transport, seed):
    opening.identify_machine = lambda: b"machine %d" % (transport.rank // 2)
    made = HostwireTransport(
        "cpu", Ledger(), transport.group, transport.control, timeout=timedelta(seconds=30)
    )
    _exchange(made, 60, random.Random(seed), random.Random(transport.rank))
    path = made.describe_path()
    made.close()
    return path


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_on_two_machines(world):
    """Memory inside a machine, TCP between them; of three ranks one is alone on its machine."""
    paths = run_ranks(world, _two_machines, world)
    both = "hostwire: shared memory and tcp"
    assert paths == [both, both, both if world == 4 else "hostwire: tcp", both][:world]


def _strangers(transport):
    callers, other = [], 1 - transport.rank

    def gather(payload):
        answers = transport.gather_bytes(payload)
        for answer in answers:
            address, port, _ = answer.decode().rsplit(" ", 2)
            callers.append(socket.create_connection((address, int(port)), 5.0))
            callers[-1].sendall(b"x" * 20)
        transport.gather_bytes(b"")  # they have called before any rank does
        return answers

    made = tcp.connect(transport.rank, [other], gather, 20.0)
    took = made.probe(other, other, 300_000, 20.0)
    made.close()
    for caller in callers:
        caller.close()
    return list(made.streams) == [other] and took > 0


def test_whoever_calls_without_the_token_is_no_rank():
    assert all(run_ranks(2, _strangers))


def _no_compiler(transport, shared):
    os.environ["FREESCALE_ENGINE"] = str(transport.rank)
    with pytest.raises(TransportError) as caught:
        HostwireTransport("cpu", Ledger(), transport.group, transport.control, shared=shared)
    return str(caught.value)


@pytest.mark.parametrize("shared", [True, False])
def test_without_an_engine_on_one_rank_it_is_refused_on_all(shared):
    """`connect` does not come so far: it falls back to process groups."""
    for text in run_ranks(2, _no_compiler, shared):
        assert "needs its engine in C, and rank 0 has none: FREESCALE_ENGINE=0" in text


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_and_path_are_in_the_ledger(wire):
    (first, paths), (second, _) = run_ranks(2, _counted, wire)
    assert first == [["rows", 24, 12], ["counts", 8, 8]] and second == [
        ["rows", 12, 24],
        ["counts", 8, 8],
    ]
    (name,) = paths["rows"]
    assert (
        paths == {"rows": {name: 24}, "counts": {name: 8}}
        and name == f"hostwire: {wire.removesuffix(': mixed')}"
    )


def _fails(transport, name, how):
    wire = hostwire(transport, name, seconds=4.0)
    lane = wire.channel(ThreadLedger(wire.ledger, "urgent"), urgent=True)
    world, size = wire.world, 50_000
    lane.all_to_all(torch.zeros(size * world), [size] * world, [size] * world, "rows").wait()
    if wire.rank == 1:
        if how == "dies":
            os._exit(1)
        transport.gather_bytes(b"")  # silent until the others have their errors
        return None
    with pytest.raises(TransportError) as caught:
        lane.all_to_all(torch.zeros(size * world), [size] * world, [size] * world, "rows").wait()
    with pytest.raises(TransportError):  # at once: the channel is broken
        lane.all_to_all(torch.zeros(world), [1] * world, [1] * world, "rows").wait()
    wire.close()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("freescale")]
    for thread in ours:
        thread.join(60)
    if how == "is silent":
        transport.gather_bytes(b"")
    return str(caught.value), [each.name for each in ours if each.is_alive()]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_lost_rank_is_an_error_on_all_others(wire, how):
    found = gather_ranks(3, _fails, wire, how, lost=[1] if how == "dies" else [])
    for rank in (0, 2):
        error, (text, left) = found[rank]
        assert error is None and not left
        assert (
            "urgent exchange of rows" in text
            and "bytes outstanding" in text
            and "rank " in text.split("failed")[1]
        )


def _closed(transport, wire):
    """A thread waits for a rank that does nothing, and another closes the transport."""
    wire = hostwire(transport, wire, seconds=600.0)
    lane = wire.channel(ThreadLedger(wire.ledger, "ahead"))
    caught, begun, each = [], threading.Event(), [1] * wire.world

    def wait():
        try:
            handle = lane.all_to_all(torch.zeros(wire.world), each, each, "rows")
            begun.set()
            handle.wait()
        except TransportError as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    if not wire.rank:
        thread.start()
        begun.wait()
        time.sleep(0.5)  # most likely it waits by now
        wire.close()
        thread.join(60)
        transport.gather_bytes(b"")
        return caught
    transport.gather_bytes(b"")
    wire.close()
    return None


def test_closing_wakes_a_thread_that_waits():
    (caught,), _ = run_ranks(2, _closed, "shared memory")
    assert "bytes outstanding" in caught


def _idle(transport, wire):
    """Processor time of a rank that waits a second for another."""
    wire = hostwire(transport, wire)
    lane = wire.channel(ThreadLedger(wire.ledger, "ahead"))
    lane.all_to_all(torch.zeros(wire.world), [1] * wire.world, [1] * wire.world, "rows").wait()
    wire.gather_bytes(b"")
    if wire.rank:
        time.sleep(1.5)
    begin = time.process_time()
    if not wire.rank:
        time.sleep(0.5)
        handle = lane.all_to_all(
            torch.zeros(wire.world), [1] * wire.world, [1] * wire.world, "rows"
        )
        handle.wait()
    else:
        lane.all_to_all(torch.zeros(wire.world), [1] * wire.world, [1] * wire.world, "rows").wait()
    used = time.process_time() - begin
    wire.close()
    return used


@pytest.mark.parametrize("wire", WIRES)
def test_no_core_is_busy_while_nothing_moves(wire):
    assert run_ranks(2, _idle, wire)[0] < 0.3  # of 1.5 seconds


def _one_is_late(transport):
    """Processor time of ranks that have answers of one peer to read while they wait for another,
    with more to send than slots."""
    opening.identify_machine = lambda: b"machine %d" % (transport.rank // 2)
    made = HostwireTransport(
        "cpu", Ledger(), transport.group, transport.control, timeout=timedelta(seconds=30)
    )
    lane, size = made.channel(ThreadLedger(made.ledger, "ahead")), 20_000_000
    lane.all_to_all(torch.zeros(3, dtype=torch.uint8), [1] * 3, [1] * 3, "rows").wait()
    made.gather_bytes(b"")
    sent = torch.full((3 * size,), made.rank, dtype=torch.uint8)
    if made.rank == 2:
        time.sleep(2.5)
    begin = time.process_time()
    if made.rank < 2:
        # what it costs to send and to receive is the same on all ranks, and not the point
        time.sleep(0.5)
    got = lane.all_to_all(sent, [size] * 3, [size] * 3, "rows").wait()
    used = time.process_time() - begin
    made.close()
    return used, got.view(3, size)[:, -1].tolist()


def test_no_core_is_busy_while_one_rank_is_late():
    (first, _), (second, _), (late, _) = found = run_ranks(3, _one_is_late)
    assert all(got == [0, 1, 2] for _, got in found)
    assert max(first, second) < late + 0.7, found  # of 2 seconds


def _wrong_interface(transport):
    if transport.rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    with pytest.raises(TransportError) as caught:
        HostwireTransport(
            "cpu",
            Ledger(),
            transport.group,
            transport.control,
            "tcp",
            shared=False,
            timeout=timedelta(seconds=600),  # nobody waits for it
        )
    return str(caught.value)


def test_an_interface_that_one_rank_does_not_have():
    for text in run_ranks(3, _wrong_interface):
        assert "rank 1" in text and "nowhere0" in text, text


def _carrier(transport, wire):
    wire = hostwire(transport, wire)
    name = type(wire._channel).__name__
    wire.close()
    return name


def test_what_carries():
    assert run_ranks(2, _carrier, "shared memory") == ["EngineChannel"] * 2
    assert run_ranks(2, _carrier, "ucx: tcp") == ["UcxChannel"] * 2


def test_bulk_gives_way_but_not_for_good(monkeypatch):
    gate, order, now = Gate(patience=0.1), [], [0.0]
    gate.give_way()  # nothing is urgent

    def bulk():
        gate.give_way()
        order.append("bulk")

    thread = threading.Thread(target=bulk)
    with monkeypatch.context() as patched:
        patched.setattr(ucx_channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
        with gate.hold(False), gate.hold(True):
            thread.start()
            for _ in range(12):  # it moves: bulk waits
                time.sleep(0.03)  # for bulk to look at the clock
                now[0] += 0.09
                gate.note_movement()
            assert not order
        thread.join()
    assert order == ["bulk"]
    with gate.hold(True):  # it does not move: bulk waits a little
        begin = time.monotonic()
        gate.give_way()
        assert time.monotonic() - begin > 0.09


def _slow_rank(transport, wire):
    """A rank's urgent traffic waits for another's, which comes after the bulk that this rank still
    has to send."""
    wire = hostwire(transport, wire)
    bulk = wire.channel(ThreadLedger(wire.ledger, "ahead"))
    urgent = wire.channel(ThreadLedger(wire.ledger, "urgent"), urgent=True)
    world, size = wire.world, 2_000_000
    given = torch.full((size * world,), float(wire.rank))
    slow = wire.rank == 1
    large = bulk.all_to_all(given, [size] * world, [size] * world, "rows")
    if slow:
        got = large.wait()
    small = urgent.all_to_all(torch.ones(world), [1] * world, [1] * world, "gradients")
    if not slow:
        got = large.wait()
    small.wait()
    wire.close()
    return torch.equal(got.view(world, size)[:, 0], torch.arange(world).float())


@pytest.mark.parametrize("wire", WIRES)
def test_urgent_that_waits_for_bulk_elsewhere(wire):
    assert all(run_ranks(3, _slow_rank, wire))


def test_the_choice_of_a_transport():
    assert choose_transport("auto", "cpu", 1, True, True, True)[0] == "hostwire-tcp"
    assert choose_transport("auto", "cpu", 2, True, True, True)[0] == "hostwire-tcp"
    assert choose_transport("auto", "cuda", 1, True, False, True)[0] == "hostwire-tcp"
    assert choose_transport("auto", "cuda", 2, True, True, True)[0] == "hostwire-ucx"
    name, why = choose_transport("auto", "cuda", 2, False, True, True)
    assert name == "hostwire-tcp" and "ucxx is missing" in why
    assert choose_transport("hostwire-tcp", "cpu", 1, False, False, True) == (
        "hostwire-tcp",
        "as requested",
    )
    with pytest.raises(ValueError, match="pip install"):
        choose_transport("hostwire-ucx", "cuda", 1, False, True, True)
    with pytest.raises(ValueError, match="transport must be one of"):
        choose_transport("pigeon", "cpu", 1, False, False, False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("machines", [1, 2])
def test_the_choice_without_the_engine(device, machines):
    for requested in ("auto", "hostwire-tcp"):
        name, why = choose_transport(requested, device, machines, True, False, False)
        assert name == "collective" and "engine" in why
    assert choose_transport("hostwire-ucx", device, machines, True, False, False)[0] == (
        "hostwire-ucx"
    )
    chosen, _ = choose_transport("auto", "cuda", 2, True, True, False)
    assert chosen == "hostwire-ucx"
