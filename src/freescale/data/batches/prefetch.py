"""Runs an iterable ahead of its consumer, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

from freescale.transport.threads import use_one_core

T = TypeVar("T")


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yields the items of `iterable`, up to `depth` ahead of the consumer.

    The iterable runs in a thread of its own. What it raises is raised here; when the consumer stops
    early (break, close, an exception), the thread ends before this generator does.

    Args:
        iterable: What to run ahead, for example a `Histories`.
        depth: Items that wait for the consumer, at most.

    Raises:
        ValueError: `depth` is below 1.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; it must be 1 or more")
    return _consume(iterable, depth)


def _consume(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    # one entry for each item that may be made; a queue wakes its reader without Python's help
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
