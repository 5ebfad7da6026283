"""Runs the application: model, socket, HTTP, signals."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from freescale.config import ServeConfig
from freescale.pipeline.process_memory import freeze_objects
from freescale.recommend.recommender import load
from freescale.recommend.serve.app import Server
from freescale.recommend.serve.model_process import ModelProcess
from freescale.recommend.serve.queries import Reader
from freescale.recommend.serve.versions import Follower, Version

_MOST_HEAD = 1 << 16  # bytes of a request before its body
_LEAVING = 30  # seconds for connections to end
_IDLE = 75  # seconds for the next request of a connection: above the usual 60 of a proxy


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
    torch.set_num_threads(1)  # the model has a process of its own
    model: Follower | ModelProcess
    if config.follow:
        model = Follower(folder, config, listener)
        server = Server(model.first, config, model)
        model.start(server.swap)
    else:
        recommender = load(folder, checkpoint=config.checkpoint, data=config.data)
        if config.approximate:
            _ = recommender.index.about  # or it says what is missing
        model = ModelProcess(recommender, config, listener)
        if recommender.loaded.histories is not None:
            _ = recommender.known_users.samples
        server = Server(Version(Reader(recommender, config), model.compute), config)
    settings = uvicorn.Config(
        server, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        log_level="error", server_header=False, timeout_graceful_shutdown=_LEAVING,
        timeout_keep_alive=_IDLE,
    )  # fmt: skip
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    runner = _Uvicorn(settings, server)
    for number in (signal.SIGTERM, signal.SIGINT):  # before anybody knows that it serves
        signal.signal(number, runner.handle_exit)
    announce(f"serving {folder} at {address}; {address}/docs has the fields")
    with freeze_objects():  # else a full collection delays requests by 100 ms and more
        runner.run([listener])
    server.close()
    model.close()


class _Uvicorn(uvicorn.Server):
    """Drains after a signal, and returns. `run` has set the handlers."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._answering = server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
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
