"""Accepts connections at a rank's socket, all at the same time: a caller that connects and sends
nothing delays nobody.

Anybody who reaches the socket can call. Callers have a short time to identify themselves, and their
number is limited: if more connect, the one that has been silent longest is dropped.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field

_GREETING_SECONDS = 2.0  # seconds that a caller has for its greeting
_MAX_SILENT = 128  # callers that may be silent at a time, in addition to the expected ranks


@dataclass
class Caller:
    """A connection, its message and files. Its receiver closes what it does not keep."""

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


def accept_callers(
    listener: socket.socket,
    size: int,
    ranks: int,
    end: float,
    welcome: Callable[[socket.socket], bool] = lambda _: True,
) -> Generator[Caller, None, None]:
    """Yields callers as they complete their greeting of `size` bytes; `ranks` are expected. Callers
    that `welcome` refuses are disconnected. TimeoutError at `end` of the monotonic clock."""
    listener.setblocking(False)
    silent: dict[int, Caller] = {}  # by descriptor, in order of arrival
    watched = select.poll()  # not select(), which takes no descriptor above 1,023
    watched.register(listener, select.POLLIN)

    def forget(number: int) -> Caller:
        watched.unregister(number)
        return silent.pop(number)

    try:
        while (now := time.monotonic()) < end:
            for number in [number for number, caller in silent.items() if caller.until <= now]:
                forget(number).close()
            next_ = min([end, *(caller.until for caller in silent.values())])
            ready = {number for number, _ in watched.poll(1e3 * max(0.001, next_ - now))}
            # before new callers are accepted
            for number in [number for number in silent if number in ready]:
                if not _read_greeting(silent[number], size):
                    forget(number).close()
                elif len(silent[number].hello) == size:
                    yield forget(number)
            if listener.fileno() in ready and (called := _accept(listener)) is not None:
                if not welcome(called):
                    called.close()
                    continue
                if len(silent) >= ranks + _MAX_SILENT:
                    forget(next(iter(silent))).close()
                silent[called.fileno()] = Caller(called, time.monotonic() + _GREETING_SECONDS)
                watched.register(called, select.POLLIN)
        raise TimeoutError("nobody called in time")
    finally:
        for caller in silent.values():
            caller.close()


def accept_peers(
    listener: socket.socket,
    size: int,
    awaited: set[int],
    end: float,
    where: str,
    find_rank: Callable[[Caller], int | None],
    welcome: Callable[[socket.socket], bool] = lambda _: True,
) -> Generator[tuple[int, Caller], None, None]:
    """As `accept_callers`, of the awaited ranks alone, each once; `find_rank` reads a caller's."""
    with closing(accept_callers(listener, size, len(awaited), end, welcome)) as callers:
        while awaited:
            try:
                caller = next(callers)
            except TimeoutError:
                raise TimeoutError(f"ranks {sorted(awaited)} did not call {where}") from None
            peer = find_rank(caller)
            if peer is None or peer not in awaited:
                caller.close()
                continue
            awaited.discard(peer)
            yield peer, caller


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        called, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # it has left again
        return None
    called.setblocking(False)
    return called


def _read_greeting(caller: Caller, size: int) -> bool:
    """Reads the caller's message. Returns whether the caller is still there."""
    try:
        part, files, _, _ = socket.recv_fds(caller.connection, size - len(caller.hello), 1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    caller.files += files
    caller.hello += part
    return bool(part) and len(caller.files) <= 1
