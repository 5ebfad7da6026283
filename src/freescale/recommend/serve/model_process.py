"""A process for the model alone. In the process that reads requests, each of the hundreds of
operations of a batch would wait for the interpreter's lock."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import numpy as np
import torch

from freescale.config import ServeConfig
from freescale.pipeline.process_memory import freeze_objects
from freescale.recommend.inputs import Past
from freescale.recommend.loading import Loaded
from freescale.recommend.recommender import Recommender, build_index
from freescale.recommend.serve.queries import Query, compute
from freescale.worker_server import count_cores

_FORK = multiprocessing.get_context("fork")  # shares the weights on the host


class Remote:
    """A process that computes, at the other end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def compute(self, queries: Sequence[Query]) -> list[Any]:
        """`queries.compute`. RuntimeError if it fails."""
        try:
            self._pipe.send(queries)
            return self.wait()
        except (EOFError, OSError):
            raise RuntimeError("the process of the model has ended") from None

    def wait(self) -> list[Any]:
        """Its next answer; the first one comes when it is ready."""
        found: Any = self._pipe.recv()
        if isinstance(found, RuntimeError):
            raise found
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """The process ends when its pipe does."""
        self._pipe.close()


class ModelProcess(Remote):
    """Computes in a process that is forked from this one, which has no threads of its own yet and
    no CUDA. It uses torch and numpy alone: threads of other libraries do not survive a fork.

    Args:
        reader: the model on the CPU; reads requests, and computes nothing.
        config: settings.
        listener: the socket that the process does not keep open.
    """

    def __init__(self, reader: Recommender, config: ServeConfig, listener: socket.socket) -> None:
        ours, theirs = _FORK.Pipe()
        super().__init__(ours)
        first = make_queries(reader)
        work = reader.loaded, config, first, theirs, (ours, listener)
        self._process = _FORK.Process(target=serve_model, args=work, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.wait()
        except EOFError:
            raise ValueError("the model does not start: see the error above") from None
        self._closing = False
        self._watch = Thread(target=self._wait, name="watch", daemon=True)
        self._watch.start()

    def _wait(self) -> None:
        self._process.join()
        if not self._closing:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Ends the process. ValueError if it has ended by itself."""
        ended, self._closing = not self._watch.is_alive(), True
        super().close()
        self._watch.join()
        if ended:
            raise ValueError(f"the process of the model ended with {self._process.exitcode}")


def serve_model(
    loaded: Loaded,
    config: ServeConfig,
    queries: Sequence[Query],
    pipe: Connection,
    others: Sequence[Any],
) -> None:
    """Computes until the pipe ends, `queries` first."""
    for other in others:
        other.close()
    for number in (signal.SIGTERM, signal.SIGINT):  # it ends when its pipe does
        signal.signal(number, signal.SIG_IGN)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(config.threads or max(1, count_cores() // 2))
    recommender = Recommender(loaded, torch.device(device))
    if config.approximate and config.follow:
        recommender.index = build_index(recommender)
    found: Any = None
    with freeze_objects():  # else a full collection takes 100 ms and more
        while queries:
            try:
                found = compute(recommender, queries, config.approximate)
            except Exception as error:
                logging.getLogger("freescale.serve").exception("a request failed")
                found = RuntimeError(str(error))
            try:
                pipe.send(found)
                queries = pipe.recv()
            except (EOFError, OSError):
                return


def make_queries(reader: Recommender) -> list[Query]:
    """Queries that compile and read what all need."""
    items, empty, zeros = reader.items, reader.read([[]]), np.zeros(2, np.int64)
    items.find(items.restore(items.popular[:1]))
    actions, features = empty.past.actions, empty.past.features
    actions = None if actions is None else zeros
    features = None if features is None else features.new_zeros(2, features.shape[1])
    first = items.listed[:1]
    past = Past(zeros[:1] + 2, first.repeat(2), zeros, actions, features)
    queries = [Query(replace(empty, past=past), wanted=first)]
    if reader.config.model.task == "retrieval":
        queries += [Query(queries[0].requests, k=1), Query(empty, k=1)]
    return queries
