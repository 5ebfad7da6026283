"""A real S3 server in a process of its own (moto's), with latency and errors.

An error is one of four: refused before anything happens (503), an answer lost after the server has
done the work, a connection that is closed, and a body that ends early.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

BUCKET = "bucket"
LATENCY_S, ERRORS = 0.05, 0.05  # of the benchmarks
SECRET = "words that no file may hold"  # of the tests' server, which accepts any
_STATISTICS = "/statistics"
_KINDS = ("refused", "lost", "closed", "cut")


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    url: str
    environment: dict[str, str]  # of processes that use it

    def read_statistics(self) -> dict[str, int]:
        """Requests, errors among them, and bytes of answers and of bodies so far."""
        with urllib.request.urlopen(self.url + _STATISTICS) as answer:
            found: dict[str, int] = json.load(answer)
        return found


@contextmanager
def run_s3(latency: float = 0.0, errors: float = 0.0, seed: int = 0) -> Iterator[S3Server]:
    """Runs a server with an empty bucket, and sets the environment of this process to use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [sys.executable, "-m", __name__, str(port), str(latency), str(errors), str(seed)]
    server = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        _wait(server, f"{url}{_STATISTICS}")
        yield S3Server(url, environment)
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError("the S3 server has ended: pip install 'moto[s3]' flask flask-cors")
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.1)
    raise RuntimeError("the S3 server does not answer")


class Faults:
    """Latency and errors before an application of WSGI; it counts requests and bytes."""

    def __init__(self, app: Any, latency: float, errors: float, seed: int) -> None:
        self._app, self.latency, self.errors = app, latency, errors
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._counts = {"requests": 0, "errors": 0, "answered": 0, "received": 0}

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        if environ["PATH_INFO"] == _STATISTICS:
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._counts).encode()]
        time.sleep(self.latency)
        with self._lock:
            fails = self._random.random() < self.errors
            kind = self._random.choice(_KINDS) if fails else ""
            self._counts["requests"] += 1
            self._counts["errors"] += fails
            self._counts["received"] += int(environ.get("CONTENT_LENGTH") or 0)
        if kind == "refused":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"]
        if kind == "closed":
            return self._close(environ)
        answered: list[Any] = []

        def note(status: str, headers: Any, *more: Any) -> Any:
            answered[:] = [status, headers]

        answer = self._app(environ, note)
        body = b"".join(answer)
        if kind == "lost":
            return self._close(environ)
        with self._lock:
            self._counts["answered"] += len(body)
        start(*answered)
        return [body[: len(body) // 2] if kind == "cut" else body]

    def _close(self, environ: dict[str, Any]) -> Any:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionError("injected")


def main() -> None:
    """PORT LATENCY ERRORS SEED: serves until it is killed."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    port, latency, errors, seed = sys.argv[1:]
    app = Faults(DomainDispatcherApplication(create_backend_app), 0.0, 0.0, int(seed))
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections stay open
    server = make_server("127.0.0.1", int(port), app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    app.latency, app.errors = float(latency), float(errors)
    threading.Event().wait()


if __name__ == "__main__":
    main()
