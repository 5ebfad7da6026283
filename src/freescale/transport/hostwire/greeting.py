"""Callers at a rank's socket are heard beside each other: who connects and says nothing holds
nobody up.

Anybody who reaches the socket can call. Each caller has a moment to say who it is, and only so many
may take it at a time; if more come, the one that has been silent longest goes.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

_GREETING = 2.0  # seconds that a caller has
_CALLERS = 128  # that may take them, beside the ranks that are waited for


@dataclass
class Caller:
    """What it said, with the files that it sent along. Whoever gets it from `heard` closes what it
    does not keep."""

    connection: socket.socket
    until: float
    hello: bytes = b""
    files: list[int] = field(default_factory=list)

    def close(self) -> None:
        self.connection.close()
        self.drop_files()

    def drop_files(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = []


def heard(
    listener: socket.socket,
    size: int,
    ranks: int,
    end: float,
    welcome: Callable[[socket.socket], bool] = lambda _: True,
) -> Generator[Caller, None, None]:
    """Callers that said `size` bytes, as they come; TimeoutError at `end`, of the monotonic clock.
    Those that are not `welcome` are sent away before they say anything."""
    listener.setblocking(False)
    silent: dict[int, Caller] = {}  # by descriptor, in the order in which they came
    watched = select.poll()  # not select(), which takes no descriptor above 1,023
    watched.register(listener, select.POLLIN)

    def leave(number: int) -> Caller:
        watched.unregister(number)
        return silent.pop(number)

    try:
        while (now := time.monotonic()) < end:
            for number in [number for number, caller in silent.items() if caller.until <= now]:
                leave(number).close()
            next_ = min([end, *(caller.until for caller in silent.values())])
            ready = {number for number, _ in watched.poll(1e3 * max(0.001, next_ - now))}
            # before anybody else is let in
            for number in [number for number in silent if number in ready]:
                if not _listen(silent[number], size):
                    leave(number).close()
                elif len(silent[number].hello) == size:
                    yield leave(number)
            if listener.fileno() in ready and (called := _accepted(listener)) is not None:
                if not welcome(called):
                    called.close()
                    continue
                if len(silent) >= ranks + _CALLERS:
                    leave(next(iter(silent))).close()
                silent[called.fileno()] = Caller(called, time.monotonic() + _GREETING)
                watched.register(called, select.POLLIN)
        raise TimeoutError("nobody called in time")
    finally:
        for caller in silent.values():
            caller.close()


def _accepted(listener: socket.socket) -> socket.socket | None:
    try:
        called, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # it has left again
        return None
    called.setblocking(False)
    return called


def _listen(caller: Caller, size: int) -> bool:
    """Whether it is still there."""
    try:
        part, files, _, _ = socket.recv_fds(caller.connection, size - len(caller.hello), 1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    caller.files += files
    caller.hello += part
    return bool(part) and len(caller.files) <= 1
