"""Data workers, each of which makes its share of a run's batches in shared memory, and the server
that forks them, which `freescale.worker_server` starts."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import socket
import tempfile
import traceback
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.batch import SequenceBatch
from freescale.batch_codec import describe_schema
from freescale.packed import Bounds, Layout, find_bounds
from freescale.pinning import pin
from freescale.worker_server import MOST_WORKERS, RECORD, Record


class Arena:
    """Anonymous memory behind an inheritable file descriptor, freed with its last mapping."""

    def __init__(self, slots: int, slot_bytes: int, fd: int | None = None) -> None:
        """`fd`: of another process's arena; None creates one."""
        page = mmap.PAGESIZE
        self.slots, self.slot_bytes = slots, -(-slot_bytes // page) * page
        size = self.slots * self.slot_bytes
        self.fd = make_file(size) if fd is None else fd
        # views of the array keep it alive, and it the mapping
        self._array: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        weakref.finalize(self, os.close, self.fd)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """[slot_bytes], a new view each time."""
        return self._array[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def pin(self) -> bool:
        """Pins the memory while a view of it lives. False if the driver refuses: copies are then
        slower."""
        try:
            pin(self._array, self._array.ctypes.data, self._array.nbytes)
        except RuntimeError:
            return False
        return True


def make_file(size: int) -> int:
    """The descriptor of an unnamed file of this size, in memory if possible."""
    if hasattr(os, "memfd_create"):  # unlike files in /dev/shm, which containers keep small
        fd = os.memfd_create("freescale-batches")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


_SHARED = 2  # file descriptors that all workers get: the arena, the pickled source


class BatchSource(Protocol):
    """Batches [start, stop), each from its number alone."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def batch(self, number: int) -> SequenceBatch: ...


@dataclass(frozen=True)
class FinishedBatch:
    """A batch that is in a slot."""

    number: int
    slot: int
    schema: str  # from batch_codec
    layout: Layout
    spans: dict[str, int]  # spans of sequences, if known
    bounds: Bounds
    message: bytes | None = None  # the buffer, if larger than a slot


def main(fd: int) -> None:
    """The server: forks workers until the connection `fd` is closed."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the trainer may need batches to stop
        signal.signal(stop, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a trainer that ignores it passes that on
    torch.set_num_threads(1)
    import freescale.data.batches.loader  # noqa: F401 - once for all workers

    gc.freeze()  # imports stay in pages that all workers share
    control = socket.socket(fileno=fd)
    workers: list[int] = []  # process ids; 0: reaped
    with suppress(ConnectionError):  # the trainer has ended
        control.sendall(RECORD.pack(Record.UP, 0))
        while True:
            message, fds, _, _ = socket.recv_fds(control, RECORD.size, _SHARED + MOST_WORKERS)
            if not message:
                break
            kind, number = RECORD.unpack(message)
            if kind == Record.FORK:
                _end(workers)
                workers = [_fork(control, fds, _SHARED + index) for index in range(number)]
                for each in fds:
                    os.close(each)
            elif kind == Record.STATUS:
                control.sendall(RECORD.pack(Record.STATUS, _wait(workers, number)))
            else:
                _end(workers)
    _end(workers)


def _fork(control: socket.socket, fds: list[int], own: int) -> int:
    """Forks a worker, whose connection is fds[own]."""
    worker = os.fork()
    if not worker:
        control.close()
        for number, fd in enumerate(fds):
            # the trainer must see a worker's end, though the others live
            if number >= _SHARED and number != own:
                os.close(fd)
        _run_worker(fds[own], *fds[:_SHARED])
    return worker


def _wait(workers: list[int], index: int) -> int:
    """The exit status of a worker that has ended or is ending."""
    _, status = os.waitpid(workers[index], 0)
    workers[index] = 0
    return os.waitstatus_to_exitcode(status)


def _end(workers: list[int]) -> None:
    """Kills the workers: they have nothing to clean up."""
    for worker in filter(None, workers):
        os.kill(worker, signal.SIGKILL)
    for worker in filter(None, workers):
        os.waitpid(worker, 0)
    workers.clear()


def _run_worker(fd: int, memory: int, source: int) -> NoReturn:
    """Runs until the connection `fd` is closed."""
    status = 1
    try:
        with suppress(EOFError, ConnectionError):  # the trainer has ended
            _work(Connection(fd), memory, source)
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        os._exit(status)  # without the server's exit handlers


def _work(connection: Connection[Any, Any], memory: int, pickled: int) -> None:
    index, workers, slots, slot_bytes = pickle.loads(connection.recv_bytes())
    try:
        arena = Arena(slots, slot_bytes, memory)
        with mmap.mmap(pickled, 0, access=mmap.ACCESS_READ) as whole:
            source: BatchSource = pickle.loads(whole)
        number, free = source.start + index, deque[int]()
        while True:  # the trainer ends it by closing the connection
            while not free or number >= source.stop or connection.poll():
                slot, needed = pickle.loads(connection.recv_bytes())
                free.extend([] if slot is None else [slot])
                while number < needed:
                    number += workers
            made = _make(source.batch(number), number, arena, free.popleft())
            connection.send_bytes(pickle.dumps(made))
            number += workers
    except (EOFError, ConnectionError):
        raise
    except BaseException as error:  # noqa: BLE001 - raised in the trainer
        connection.send_bytes(_pickle_error(error))
        connection.recv_bytes()  # wait until it has been read


def _make(batch: SequenceBatch, number: int, arena: Arena, slot: int) -> FinishedBatch:
    tensors = batch.tensors()
    layout = Layout.of(tensors)
    large = layout.size > arena.slot_bytes
    buffer = (
        torch.empty(layout.size, dtype=torch.uint8)
        if large
        else torch.from_numpy(arena.view(slot))[: layout.size]
    )
    layout.write(tensors, buffer)
    spans = {name: part.span for name, part in batch.sequences.items() if part.span is not None}
    message = buffer.numpy().tobytes() if large else None
    bounds = find_bounds(tensors)
    return FinishedBatch(number, slot, describe_schema(batch), layout, spans, bounds, message)


def _pickle_error(error: BaseException) -> bytes:
    """The error with its traceback as a note; as text if it cannot be pickled."""
    note = f"in a data worker:\n{''.join(traceback.format_exception(error)).rstrip()}"
    error.add_note(note)
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:  # noqa: BLE001
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}\n{note}"))
