"""Versions of a model that a server follows.

    server -- control -- builder: applies deltas, forks a process for each version
       `------- pipe --- process of a version, which computes

Neither requests nor the model in service wait for the builder: it has an interpreter of its own.
A version is swapped in when its process is ready.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pyarrow.compute as pc
import torch

from freescale.config import ServeConfig
from freescale.data.catalogue import Catalogue
from freescale.data.store.event_store import ABOUT, open_growing
from freescale.data.stream.stream import STORE, STREAM
from freescale.recommend.recommender import Recommender
from freescale.recommend.serve.batching import Compute
from freescale.recommend.serve.model_process import Remote, make_queries, serve_model
from freescale.recommend.serve.queries import Reader, UserCache
from freescale.recommend.subscriber import Subscriber

_FORK = multiprocessing.get_context("fork")
_POLL = 0.2  # seconds between two looks at the folder


class Version:
    """What answers requests: a reader and a model of the same state. Closed when a later one is in
    service and nobody uses it."""

    def __init__(
        self, reader: Reader, compute: Compute, close: Callable[[], None] = lambda: None
    ) -> None:
        self.reader, self.compute, self._close = reader, compute, close
        self.about: dict[str, Any] = {}  # number and step of a run's version that is followed
        self._users, self._lock = 1, Lock()  # the server is one

    def acquire(self) -> bool:
        """False: it is closed."""
        with self._lock:
            self._users += self._users > 0
            return self._users > 0

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._close()


class Follower:
    """The builder, as the server sees it. Made before the server has threads or has read anything.
    `listener`: the socket that other processes do not keep open."""

    def __init__(self, folder: Path, config: ServeConfig, listener: socket.socket) -> None:
        self._control, theirs = _FORK.Pipe()
        work = folder, config, theirs, (self._control, listener)
        self._process = _FORK.Process(target=_build, args=work)
        self._process.start()
        theirs.close()
        self._config, self._closing, self._store = config, False, folder / STREAM / STORE
        self.alarm: str | None = None
        self.swaps = 0
        self.seconds = {"apply": 0.0, "build": 0.0}  # durations of the last change of version
        self._cache: UserCache | None = None
        problem, built = self._control.recv()
        if not built:
            raise ValueError(problem)
        self._base = Subscriber(folder).load()
        self._base.module.to("meta")  # reads requests, and computes nothing
        try:
            self.first = self._open(*built)
        except EOFError:
            raise ValueError("the model does not start: see the error above") from None

    def start(self, swap: Callable[[Version], None]) -> None:
        """From now on calls `swap` with each new version."""
        self._thread = Thread(target=self._follow, args=(swap,), name="versions", daemon=True)
        self._thread.start()

    def _follow(self, swap: Callable[[Version], None]) -> None:
        try:
            while True:
                self.alarm, built = self._control.recv()
                if built:
                    swap(self._open(*built))
                    self.swaps += 1
        except (EOFError, OSError, RuntimeError):
            if not self._closing:
                os.kill(os.getpid(), signal.SIGTERM)

    def _open(self, about: dict[str, Any], applied: float, items: Catalogue, texts: Any) -> Version:
        """Waits until the process of a version is ready, and makes its reader meanwhile. `texts`:
        of values of events."""
        begin = time.perf_counter()
        remote = Remote(Connection(recv_handle(self._control)))
        loaded = replace(self._base.loaded, catalogue=items)
        if loaded.features is not None and texts is not None:
            loaded = replace(loaded, features=loaded.features.adopt(texts))
        if (self._store / ABOUT).is_file():  # users whose events the run has
            loaded = replace(loaded, histories=open_growing(self._store))
        recommender = Recommender(loaded, torch.device("meta"))
        items.find(items.restore(items.popular[:1]))
        reader = Reader(recommender, self._config, about["number"], self._cache)
        self._cache = reader.cache
        remote.wait()
        version = Version(reader, remote.compute, remote.close)
        version.about = about | {"served": time.time()}
        self.seconds = {"apply": applied, "build": time.perf_counter() - begin}
        return version

    def close(self) -> None:
        """Ends the builder. ValueError if it has ended by itself."""
        ended, self._closing = not self._process.is_alive(), True
        with suppress(OSError):
            self._control.send(None)
        self._process.join()
        self._thread.join()
        self._control.close()
        if ended:
            raise ValueError(f"the process of the model ended with {self._process.exitcode}")


def _build(folder: Path, config: ServeConfig, control: Connection, others: tuple[Any, ...]) -> None:
    """The builder: begins with what is published, and goes on until the server ends."""
    for other in others:
        other.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # threads would not survive a fork
    begin, alarm, built = time.perf_counter(), None, -1
    try:
        subscriber = Subscriber(folder)
    except (ValueError, OSError) as error:
        control.send((str(error), None))
        return
    process: Any = None
    while True:
        if subscriber.number != built:
            process, built = _start_version(subscriber, config, control, begin), subscriber.number
            alarm = None
        if control.poll(_POLL) or not process.is_alive():  # the server ends, or will
            return
        multiprocessing.active_children()  # forgets those that have ended
        begin, problem = time.perf_counter(), None
        try:
            subscriber.update()
        except (ValueError, OSError) as error:
            problem = str(error)
        if problem != alarm:
            alarm = problem
            control.send((alarm, None))


def _start_version(
    subscriber: Subscriber, config: ServeConfig, control: Connection, begin: float
) -> Any:
    recommender, last = subscriber.load(), subscriber.last
    ours, theirs = _FORK.Pipe()
    work = recommender.loaded, config, make_queries(recommender), theirs, (ours, control)
    process = _FORK.Process(target=serve_model, args=work, daemon=True)
    process.start()
    about = {name: last.about[name] for name in ("number", "step", "published", "trained_until")}
    texts = recommender.loaded.texts
    if texts is not None:
        texts = texts.filter(pc.starts_with(texts["column"], "category."))
    control.send((None, (about, time.perf_counter() - begin, recommender.items, texts)))
    send_handle(control, ours.fileno(), os.getppid())
    for pipe in (ours, theirs):
        pipe.close()
    return process
