"""Runs an iterable ahead of its consumer, in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

from freescale.transport.threads import use_one_core

T = TypeVar("T")


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yields the items of `iterable`, up to `depth` ahead of the consumer.

    The iterable runs in a background thread. Its exceptions are raised here. If the consumer stops
    early (break, close, an exception), the thread ends before this generator does.

    Args:
        iterable: the iterable to run ahead, for example a `Histories`.
        depth: maximum number of items that wait for the consumer.

    Raises:
        ValueError: if `depth` is below 1.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; it must be 1 or more")
    return _consume(iterable, depth)


def _consume(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    # One entry per item that may still be produced. A semaphore would do, but SimpleQueue is
    # written in C and wakes its reader without running Python code.
    slots: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(depth):
        slots.put(None)
    stopped = threading.Event()

    def produce() -> None:
        try:
            use_one_core()
            source = iter(iterable)
            try:
                while True:
                    slots.get()
                    if stopped.is_set():
                        return
                    try:
                        item = next(source)
                    except StopIteration:
                        break
                    items.put(("item", item))
            finally:
                close = getattr(source, "close", None)
                if close is not None:
                    close()
            items.put(("end", None))
        except BaseException as error:
            items.put(("error", error))

    thread = threading.Thread(target=produce, name="freescale-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = items.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            slots.put(None)
            yield value
    finally:
        stopped.set()
        slots.put(None)
        thread.join()
