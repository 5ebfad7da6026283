"""Runs the application: model, socket, HTTP, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from freescale.config import ServeConfig
from freescale.pipeline.process_memory import freeze_objects
from freescale.recommend.inputs import Past
from freescale.recommend.recommender import Recommender, load
from freescale.recommend.serve.app import Server
from freescale.recommend.serve.queries import Query, compute

_MOST_HEAD = 1 << 16  # bytes of a request before its body
_LEAVING = 30  # seconds for connections to end
_SWITCH = 0.0002  # seconds: the event loop waits no longer for the thread of the model


def open_socket(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {config.host}, port {config.port}: {error.strerror or error}; "
            "choose another with --host and --port"
        ) from None


def run(
    folder: Path, config: ServeConfig, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    """Serves until SIGTERM or SIGINT, then answers what is queued."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // 2))
    sys.setswitchinterval(_SWITCH)
    recommender = load(folder, device, checkpoint=config.checkpoint, data=config.data)
    _warm_up(recommender)
    server = Server(recommender, config)
    settings = uvicorn.Config(
        server, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        log_level="error", server_header=False, timeout_graceful_shutdown=_LEAVING,
    )  # fmt: skip
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    announce(f"serving {folder} at {address}; {address}/docs has the fields")
    with freeze_objects():  # else a full collection delays requests by 100 ms and more
        _Uvicorn(settings, server).run([listener])
    server.close()


def _warm_up(recommender: Recommender) -> None:
    """Answers queries, which compiles and reads what all need."""
    items, empty, zeros = recommender.items, recommender.read([[]]), np.zeros(2, np.int64)
    actions, features = empty.past.actions, empty.past.features
    actions = None if actions is None else zeros
    features = None if features is None else features.new_zeros(2, features.shape[1])
    first = items.find(items.restore(items.listed[:1]))
    past = Past(zeros[:1] + 2, first.repeat(2), zeros, actions, features)
    queries = [Query(replace(empty, past=past), wanted=first)]
    if recommender.config.model.task == "retrieval":
        queries += [Query(queries[0].requests, k=1), Query(empty, k=1)]
    compute(recommender, queries)
    if recommender.loaded.histories is not None:
        _ = recommender.known_users.samples


class _Uvicorn(uvicorn.Server):
    """Drains after a signal, and returns."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._answering = server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._answering.batcher.drain()
        super().handle_exit(sig, frame)


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request."""

    _head = 0

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._head > _MOST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._head = -sys.maxsize
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()
