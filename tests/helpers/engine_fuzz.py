"""Drives the engine by itself, without torch: `python engine_fuzz.py LIBRARY SEED`, with a library
that was built with sanitizers.

Ranks are threads of this process, with memory from malloc, whose ends a sanitizer watches. Sizes,
and what a hostile peer says, are random; tensors of a "GPU" are host memory behind a driver that
copies at once and is slow to say so.
"""

from __future__ import annotations

import ctypes
import fcntl
import random
import socket
import struct
import sys
import termios
import threading
from contextlib import suppress
from ctypes import CFUNCTYPE, byref, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from itertools import count

from freescale.transport.hostwire.bindings import Driver, EngineLibrary, ErrorCode

SLOTS, SLOT, TOGETHER, INBOX = 8, 32 << 10, 16 << 10, 8 << 10
NOT_READY = 600
HELD: list[object] = []  # callbacks, as long as the process


class ByChance:
    """Events that are over at one look and not at another."""

    def __init__(self):
        self._draw = random.Random(0)

    def record(self, event, stream):
        return 0

    def query(self, event):
        return NOT_READY if self._draw.random() < 0.5 else 0


def make_driver(events) -> Driver:
    """A driver with these events."""
    numbers = count(1)

    def copy(to, of, size, stream):
        ctypes.memmove(to, of, size)
        return 0

    def create(place, flags):
        place[0] = next(numbers)
        return 0

    one = CFUNCTYPE(c_int, c_void_p)
    functions = [
        CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)(copy),
        CFUNCTYPE(c_int, c_void_p, c_void_p)(events.record),
        one(events.query),
        CFUNCTYPE(c_int, ctypes.POINTER(c_uint64), c_uint)(create),
        one(lambda event: 0),
        one(lambda context: 0),
    ]
    HELD.extend(functions)
    return Driver(*(ctypes.cast(function, c_void_p).value for function in functions), None)


class Rank:
    """A channel, its ring and its ends of the sockets: `out` and `into` by peer; `rings`: those of
    peers in the same machine."""

    def __init__(self, library, rank, world, out, into, rings, device, events=None):
        self.library, self.rank, self.world, self.out, self.into = library, rank, world, out, into
        self.rings, self.device = rings, device
        self.gate = library.gate_new(0.001)
        slots = 2 * sum(1 for peer in out if peer not in rings) if device else 0
        self.inbox = ctypes.create_string_buffer(max(1, slots * INBOX))
        ring = (ctypes.addressof(rings[rank]), SLOTS, SLOT, TOGETHER)
        driver = byref(make_driver(events or ByChance())) if device else None
        inbox = (ctypes.addressof(self.inbox), slots, INBOX)
        self.channel = library.channel_new(
            world, rank, *ring, *inbox, self.gate, 0.0, driver, None, None
        )
        for peer in out:
            theirs = ctypes.addressof(rings[peer]) if peer in rings else None
            library.channel_set_peer(
                self.channel, peer, out[peer].fileno(), into[peer].fileno(), theirs
            )
        self.kept = []

    def exchange(self, sent, sizes, urgent=False, largest=8 << 10):
        """Begins: `sent` bytes by peer, `sizes` of what comes. (number, what comes, by peer)."""
        out = [ctypes.create_string_buffer(data, max(1, len(data))) for data in sent]
        into = [ctypes.create_string_buffer(max(1, size)) for size in sizes]
        addresses, counts = c_uint64 * self.world, c_int64 * self.world
        arrays = (
            addresses(*map(ctypes.addressof, out)),
            counts(*map(len, sent)),
            addresses(*map(ctypes.addressof, into)),
            counts(*sizes),
        )
        number = self.library.channel_submit(
            self.channel, urgent, not self.device, None, largest, *arrays
        )
        self.kept.append((out, into))
        return number, into

    def until(self, number, seconds=20.0):
        return self.library.channel_wait(self.channel, number, seconds)

    def error(self):
        peer, cause = c_int(), c_int64()
        return self.library.channel_error(self.channel, byref(peer), byref(cause)), peer.value

    def close(self):
        self.library.channel_stop(self.channel)
        self.library.channel_free(self.channel)
        self.library.gate_free(self.gate)


def connect_streams():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    for end in (calling, called):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # streams get stuck
    return calling, called


def join_ranks(library, world, alone, device, events=None):
    """`world` ranks; those in `alone` are reached by streams, the others share memory. `events`: of
    the driver of each."""
    out, into = ([{} for _ in range(world)] for _ in range(2))
    rings = [ctypes.create_string_buffer(SLOTS * SLOT) for _ in range(world)]
    for one in range(world):
        for two in range(one + 1, world):
            if one in alone or two in alone:
                out[one][two], out[two][one] = into[one][two], into[two][one] = connect_streams()
            else:
                out[one][two], into[two][one] = socket.socketpair()
                out[two][one], into[one][two] = socket.socketpair()
    seen = [
        {r: rings[r] for r in range(world) if r == rank or not {r, rank} & alone}
        for rank in range(world)
    ]
    return [
        Rank(
            library,
            rank,
            world,
            out[rank],
            into[rank],
            seen[rank],
            device,
            events[rank] if events else None,
        )
        for rank in range(world)
    ]


def make_message(source, target, number, size):
    return random.Random(f"{source} {target} {number}").randbytes(size)


def exchange_messages(rank, seed, messages, failures):
    draw, under_way = random.Random(seed), []  # the same on every rank
    try:
        for number in range(messages):
            sizes = [
                [draw.choice((0, 1, 17, 4000, draw.randrange(200_000))) for _ in range(rank.world)]
                for _ in range(rank.world)
            ]
            sent = [
                make_message(rank.rank, to, number, sizes[rank.rank][to])
                for to in range(rank.world)
            ]
            begun = rank.exchange(
                sent, [sizes[of][rank.rank] for of in range(rank.world)], urgent=number % 3 == 0
            )
            under_way.append((number, sizes, begun))
            while len(under_way) > 3 or (under_way and number == messages - 1):
                which, sizes, (job, into) = under_way.pop(0)
                assert rank.until(job) == 0, rank.error()
                for of in range(rank.world):
                    size = sizes[of][rank.rank]
                    assert of == rank.rank or into[of].raw[:size] == make_message(
                        of, rank.rank, which, size
                    ), (rank.rank, of, which)
    except BaseException as error:  # noqa: BLE001 - told by main
        failures.append(error)


def run_exchanges(library, seed):
    for world, alone, device in (
        (2, set(), False),
        (2, {0}, False),
        (3, {2}, False),
        (3, set(), True),
        (2, {1}, True),
        (3, {0}, True),
    ):
        ranks, failures = join_ranks(library, world, alone, device), []
        threads = [
            threading.Thread(target=exchange_messages, args=(rank, seed, 20, failures))
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in ranks:
            rank.close()
        assert not failures, (world, alone, device, failures)


def make_garbage(draw, size):
    """What a hostile peer says: noise, or a message of which one number is wrong, or none."""
    right = struct.pack("<QQ", 0, size)
    wild = draw.choice(
        (
            0,
            1,
            size - 1,
            size + 1,
            SLOTS * SLOT - size + 1,
            1 << 31,
            1 << 46,
            (1 << 63) - 1,
            (1 << 64) - 1,
        )
    )
    return draw.choice(
        (
            draw.randbytes(draw.randrange(40)),
            struct.pack("<QQ", wild, size),
            struct.pack("<QQ", 0, wild),
            right * 3,
            b"",
        )
    )


def run_hostile_peers(library, seed, rounds):
    """Rank 0 alone with a peer that says anything: it ends, with an error that names the peer or
    well, and never by a crash."""
    draw, errors = random.Random(seed), set()
    for _ in range(rounds):
        stream, device, size = (
            draw.random() < 0.5,
            draw.random() < 0.3,
            draw.choice((1, 100, 9000, 40_000)),
        )
        rings = {0: ctypes.create_string_buffer(SLOTS * SLOT)} | (
            {} if stream else {1: ctypes.create_string_buffer(SLOTS * SLOT)}
        )
        mine, theirs = zip(
            *([connect_streams()] * 2 if stream else [socket.socketpair() for _ in range(2)]),
            strict=True,
        )
        for end in (*mine, *theirs):
            end.setblocking(False)
        rank = Rank(library, 0, 2, {1: mine[0]}, {1: mine[1]}, rings, device)
        with suppress(OSError):
            theirs[1].send(make_garbage(draw, min(size, 8 << 10)))
            theirs[0].send(b"." * draw.choice((0, 0, 1, 3, 500)))
            if draw.random() < 0.5:
                theirs[1].shutdown(socket.SHUT_WR)
        for _ in range(2):
            number, _ = rank.exchange(
                [b"", draw.randbytes(draw.choice((0, 100, 300_000)))], [0, size]
            )
            if number < 0 or rank.until(number, 0.01):
                break
        code, peer = rank.error()
        errors.add(code)
        assert not code or peer == 1, (code, peer)
        rank.close()
        for end in (*mine, *theirs):
            end.close()
    assert errors >= set(ErrorCode) - {ErrorCode.NONE, ErrorCode.DEVICE}, (
        errors
    )  # every answer to nonsense was seen


def run_deaf_peer(library, sends):
    """A peer that never reads what it is told, while it answers as if it did, or `sends` pieces:
    the time runs out."""
    rings = {rank: ctypes.create_string_buffer(SLOTS * SLOT) for rank in range(2)}
    (out, theirs), (into, other) = socket.socketpair(), socket.socketpair()
    for end in (out, theirs, into, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is
    rank, ended = Rank(library, 0, 2, {1: out}, {1: into}, rings, False), threading.Event()

    def answer():
        answered, unread = 0, struct.Struct("i")
        while not ended.wait(0.001):
            (waiting,) = unread.unpack(fcntl.ioctl(theirs, termios.FIONREAD, bytes(unread.size)))
            with suppress(BlockingIOError):
                answered += (
                    theirs.send(b"." * (waiting // 16 - answered))
                    if waiting // 16 > answered
                    else 0
                )

    def send():
        left = 60
        while not ended.wait(0.001):
            with suppress(BlockingIOError):
                while left:
                    other.send(struct.pack("<QQ", 0, 8 << 10))
                    left -= 1

    thread = threading.Thread(target=send if sends else answer)
    thread.start()
    bytes_ = 60 * (8 << 10)
    number, _ = rank.exchange([b"", b"" if sends else bytes(bytes_)], [0, bytes_ if sends else 0])
    found = rank.until(number, 0.3), rank.error()
    ended.set()
    thread.join()
    rank.close()
    assert found == (ErrorCode.TIMED_OUT, (ErrorCode.TIMED_OUT, 1)), found


if __name__ == "__main__":
    library, seed = EngineLibrary(sys.argv[1]), int(sys.argv[2])
    run_exchanges(library, seed)
    run_hostile_peers(library, seed, 250)
    run_deaf_peer(library, sends=False)
    run_deaf_peer(library, sends=True)
    print("well")
