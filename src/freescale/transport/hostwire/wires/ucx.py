"""The wire over UCX (through ucxx): sockets, shared memory or RDMA, as UCX finds and UCX_TLS
allows.

One thread owns UCX's objects: it posts what others submit, makes progress and wakes threads that
wait. A peer is gone when its connection breaks (shared memory has none), its process ends on this
machine, or `close` sends its goodbye. Otherwise it is silent, and `wait` times out.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from freescale.transport.api import Gather, TransportError
from freescale.transport.failures import needing
from freescale.transport.machine import identify_machine

# Defaults; the user's UCX_... variables win. Pieces from 16 KB leave when the receiver expects
# them. One rail: a goodbye must not overtake a piece. No CUDA: only host memory is sent, and UCX
# would query the driver about all of it. Over sockets UCX copies a piece by segments: its own 8 KB
# reach a third of the speed.
_SETTINGS = {
    "RNDV_THRESH": "16K",
    "MAX_RNDV_RAILS": "1",
    "TLS": "^cuda",
    "TCP_TX_SEG_SIZE": "128K",
    "TCP_RX_SEG_SIZE": "128K",
}
# transports without a connection that could break
_MEMORY = {"self", "sysv", "posix", "cma", "xpmem", "knem"}
_HELLO, _GOODBYE = 1, 2
_FAILS = "UCX fails on rank {}: {}"
_CLOSED = "it closed its wire"
_PATIENCE = 0.5  # seconds that a closing rank waits for the others to answer


class Piece:
    """Bytes on their way to or from a peer."""

    def __init__(self, peer: int, memory: Tensor, tag: int, out: bool) -> None:
        self.peer, self.memory, self.tag, self.out = peer, memory, tag, out
        self._done, self._error = threading.Event(), ""

    def finish(self, error: str = "") -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self, seconds: float) -> None:
        """Until the memory is sent or filled. OSError if the peer is gone, or `seconds` silent."""
        if not self._done.wait(seconds):
            raise TimeoutError(f"silent for {seconds:g} s")
        if self._error:
            raise ConnectionError(self._error)


class UcxWire:
    """A wire to all ranks. A collective to make: `gather` is `Transport.gather_bytes`. Raises
    TransportError on all ranks if UCX fails on one."""

    def __init__(self, rank: int, world: int, gather: Gather) -> None:
        self._rank, self._world = rank, world
        with needing(_FAILS, gather, Exception):
            self._api, self._array, self._tag = _load()
            settings = {
                name: value for name, value in _SETTINGS.items() if f"UCX_{name}" not in os.environ
            }
            context = self._api.UCXContext(
                settings, (self._api.Feature.TAG, self._api.Feature.WAKEUP)
            )
            self._worker = self._api.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            address = self._worker.address.tobytes()
        found = {
            line.split()[-1].split("/")[0]
            for line in context.info.splitlines()
            if " resource " in line
        }
        self._connected = not found <= _MEMORY
        self.path = "ucx" if self._connected else "ucx: shared memory"
        if found <= {"tcp", "self"}:
            self.path = "ucx: tcp"
        self._gone = [""] * world  # why a peer is gone
        self._left: set[int] = set()  # peers to which this rank has sent a goodbye
        self._endpoints: dict[int, Any] = {}
        # descriptor that becomes readable when a process ends -> its rank
        self._processes: dict[int, int] = {}
        addresses = gather(address)
        places = gather(b"%d " % os.getpid() + _identify_process_namespace())
        with needing(_FAILS, gather, Exception):
            for peer in (peer for peer in range(world) if peer != rank):
                self._reach(peer, addresses[peer], places[peer])
        self._bell = os.eventfd(0)
        self._poll = select.poll()
        for file in (self._bell, self._worker.epoll_file_descriptor, *self._processes):
            self._poll.register(file, select.POLLIN)
        self._lock = threading.Lock()  # of what other threads submit
        self._submitted: deque[Piece] = deque()
        self._is_asleep = self._closed = False
        self._posted: list[tuple[Piece, Any]] = []  # each with UCX's request
        # connects now: a rank that only receives would not notice a broken connection
        for peer in self._endpoints:
            self._say(peer, _HELLO)
            self._listen(peer)
        self._thread = threading.Thread(target=self._run, name="freescale ucx", daemon=True)
        self._thread.start()

    def _reach(self, peer: int, address: bytes, place: bytes) -> None:
        try:
            there = self._api.UCXAddress.create_from_buffer(address)
            self._endpoints[peer] = self._api.UCXEndpoint.create_from_worker_address(
                self._worker, there, self._connected
            )
            process, namespace = place.split(b" ", 1)
            if namespace == _identify_process_namespace():
                self._processes[os.pidfd_open(int(process))] = peer
        except Exception as error:
            raise OSError(f"no way to rank {peer}: {error}") from error

    def send(self, peer: int, piece: Tensor) -> Piece:
        return self._submit(Piece(peer, piece, self._rank, out=True))

    def expect(self, peer: int, into: Tensor) -> Piece:
        return self._submit(Piece(peer, into, peer, out=False))

    def probe(self, after: int | None, before: int | None, size: int, seconds: float) -> float:
        """As `TcpWire.probe`."""
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        begin = time.perf_counter()
        pieces = [self.expect(before, into)] if before is not None else []
        pieces += [self.send(after, out)] if after is not None else []
        for piece in pieces:
            piece.wait(seconds)
        return time.perf_counter() - begin

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wake()
        self._thread.join(timeout=10 * _PATIENCE)

    def _submit(self, piece: Piece) -> Piece:
        with self._lock:
            if self._closed:
                raise ConnectionError("the wire is closed")
            self._submitted.append(piece)
            self._wake()
        return piece

    def _wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            os.eventfd_write(self._bell, 1)

    # ---- of the thread

    def _run(self) -> None:
        reason = "the wire was closed"
        try:
            while not self._closed:
                while self._submitted:
                    self._post(self._submitted.popleft())
                self._progress()
                with self._lock:
                    self._is_asleep = not self._submitted and not self._closed
                if self._is_asleep:
                    self._sleep(None)
        except Exception as error:
            reason = f"UCX: {error}"
        with self._lock:
            self._closed, self._is_asleep = True, False
        for piece in (*self._submitted, *(piece for piece, _ in self._posted)):
            piece.finish(reason)
        self._shut_down()

    def _sleep(self, milliseconds: float | None) -> None:
        """Until something happens. UCX refuses to be armed if something already has."""
        for file, _ in self._poll.poll(milliseconds) if self._worker.arm() else ():
            if file == self._bell:
                os.eventfd_read(file)
            elif file in self._processes:
                self._poll.unregister(file)
                self._mark_gone(self._processes[file], "its process ended")

    def _post(self, piece: Piece) -> None:
        endpoint, array, tag = (
            self._endpoints[piece.peer],
            self._array(piece.memory.numpy()),
            self._tag(piece.tag),
        )
        self._posted.append(
            (piece, endpoint.tag_send(array, tag) if piece.out else endpoint.tag_recv(array, tag))
        )

    def _progress(self) -> None:
        self._worker.progress()
        for peer, endpoint in self._endpoints.items():
            if not endpoint.alive:
                self._mark_gone(peer, "its connection broke")
        posted, self._posted = self._posted, []
        for piece, request in posted:
            if not request.completed:
                self._posted.append((piece, request))
                continue
            try:
                request.check_error()
            except Exception as error:
                self._mark_gone(piece.peer, f"UCX: {error}")
                piece.finish(self._gone[piece.peer])
                continue
            piece.finish()
            if piece.tag == self._world + piece.peer:  # its message
                if piece.memory[0] == _HELLO:
                    self._listen(piece.peer)
                else:
                    self._mark_gone(piece.peer, _CLOSED)
                    self._say_goodbye(piece.peer)
        if any(self._gone):
            for piece, _ in self._posted:  # kept: UCX may still write to their memory
                if self._gone[piece.peer]:
                    piece.finish(self._gone[piece.peer])

    def _mark_gone(self, peer: int, why: str) -> None:
        self._gone[peer] = self._gone[peer] or why  # the first reason is the cause

    def _say(self, peer: int, what: int) -> None:
        self._post(
            Piece(peer, torch.tensor([what], dtype=torch.uint8), self._world + self._rank, out=True)
        )

    def _listen(self, peer: int) -> None:
        self._post(Piece(peer, torch.zeros(1, dtype=torch.uint8), self._world + peer, out=False))

    def _say_goodbye(self, peer: int) -> None:
        """Once per peer, which answers at once: then it has received all that this rank sent."""
        if peer not in self._left:
            self._left.add(peer)
            self._say(peer, _GOODBYE)

    def _shut_down(self) -> None:
        with suppress(Exception):  # UCX cannot send any more
            for peer in self._endpoints:
                if not self._gone[peer]:
                    self._say_goodbye(peer)
            end = time.monotonic() + _PATIENCE
            while not all(self._gone[peer] for peer in self._endpoints) and time.monotonic() < end:
                self._progress()
                self._sleep(10)
        for file in self._processes:
            os.close(file)
        os.close(self._bell)  # nobody rings: the wire is closed
        everything = (self._worker, self._endpoints, self._posted)
        if self._connected or all(self._gone[peer] == _CLOSED for peer in self._endpoints):
            for endpoint in self._endpoints.values():
                endpoint.close_blocking()
        # UCX would wait forever for silent peers: it keeps its objects, and the memory that it may
        # write to
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(everything))
        memory = [piece.memory for piece, _ in self._posted]
        del everything, self._worker
        self._endpoints, self._posted = {}, []
        del memory  # after UCX's worker


def _identify_process_namespace() -> bytes:
    """A name that is equal where one process can watch another."""
    return identify_machine() + b" %d" % os.stat("/proc/self/ns/pid").st_ino


def _load() -> tuple[Any, Any, Any]:
    before = set(os.environ)
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
        from ucxx.types import Tag
    except ImportError as error:
        raise TransportError(f"{error}: pip install 'freescale[ucx]' brings ucxx") from error
    finally:
        # ucxx sets variables of UCX for GPUs; those that the user has not set stay unset
        for name in set(os.environ) - before:
            del os.environ[name]
    return libucxx, Array, Tag
