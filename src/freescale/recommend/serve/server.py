"""Runs the application: a socket, HTTP, signals."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

import numpy as np
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from freescale.recommend.inputs import Past
from freescale.recommend.recommender import Recommender
from freescale.recommend.serve.app import Server
from freescale.recommend.serve.queries import Query, compute

_MOST_HEAD = 1 << 16  # bytes of a request before its body
_LEAVING = 30  # seconds for connections to end
_SWITCH = 0.001  # seconds: the event loop waits no longer for the thread of the model


def open_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        message = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        raise ValueError(f"{message}; choose another with --host and --port") from None


def warm_up(recommender: Recommender) -> None:
    """Answers a query, which compiles and reads what all need."""
    items, empty = recommender.items, recommender.read([[]])
    past, zeros = empty.past, np.zeros(2, np.int64)
    codes = None if past.features is None else past.features.new_zeros(2, past.features.shape[1])
    actions = None if past.actions is None else zeros
    past = Past(zeros[:1] + 2, items.listed[:1].repeat(2), zeros, actions, codes)
    requests = replace(empty, past=past)
    wanted = items.find(items.restore(items.listed[:1]))
    query = Query(requests, wanted=wanted)
    if recommender.config.model.task == "retrieval":
        compute(recommender, [Query(requests, k=1), Query(empty, k=1)])
    compute(recommender, [query])
    if recommender.loaded.histories is not None:
        _ = recommender.known_users.samples


def run(server: Server, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. Then answers what is queued."""
    sys.setswitchinterval(_SWITCH)
    config = uvicorn.Config(
        server,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LEAVING,
    )
    host, port = listener.getsockname()[:2]
    announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    _Uvicorn(config, server).run([listener])
    server.close()


class _Uvicorn(uvicorn.Server):
    """Ends with status 0 after a signal, which begins the drain."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._answering = server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        signals = signal.SIGTERM, signal.SIGINT
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0

    def on_headers_complete(self) -> None:
        self._head = -sys.maxsize
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head = 0
