"""A worker: makes its share of a run's batches, in shared memory. `workers.py` starts it."""

from __future__ import annotations

import pickle
import signal
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from freescale.batch import SequenceBatch
from freescale.batch_codec import describe_schema
from freescale.data.arena import Arena
from freescale.packed import Layout


class BatchSource(Protocol):
    """Batches [start, stop), each from its number alone."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def batch(self, number: int) -> SequenceBatch: ...


@dataclass(frozen=True)
class Made:
    """A batch that is in a slot."""

    number: int
    slot: int
    schema: str  # of batch_codec
    layout: Layout
    spans: dict[str, int]  # of sequences that know theirs
    message: bytes | None = None  # the buffer itself, if it is larger than a slot


def main(fd: int) -> None:
    """Works until the connection `fd` is closed."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the trainer may need more batches to stop well
        signal.signal(stop, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection: Connection[Any, Any] = Connection(fd)
    with suppress(EOFError, ConnectionError):  # the trainer has ended
        _work(connection)


def _work(connection: Connection[Any, Any]) -> None:
    index, workers, memory, slots, slot_bytes = pickle.loads(connection.recv_bytes())
    pickled = connection.recv_bytes()
    try:
        arena = Arena(slots, slot_bytes, memory)
        source: BatchSource = pickle.loads(pickled)
        connection.send_bytes(pickle.dumps(None))
        number = source.start + index
        while True:  # the end is the trainer's: it closes the connection
            slot, needed = pickle.loads(connection.recv_bytes())
            while number < needed:
                number += workers
            if number < source.stop:
                made = _make(source.batch(number), number, arena, slot)
                connection.send_bytes(pickle.dumps(made))
                number += workers
    except (EOFError, ConnectionError):
        raise
    except BaseException as error:  # noqa: BLE001 - raised in the trainer
        connection.send_bytes(_pickle_error(error))
        connection.recv_bytes()  # it is read before the connection ends


def _make(batch: SequenceBatch, number: int, arena: Arena, slot: int) -> Made:
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
    return Made(number, slot, describe_schema(batch), layout, spans, message)


def _pickle_error(error: BaseException) -> bytes:
    """The error with its traceback as a note; in words, if it cannot be pickled."""
    note = f"in a data worker:\n{''.join(traceback.format_exception(error)).rstrip()}"
    error.add_note(note)
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:  # noqa: BLE001
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}\n{note}"))
