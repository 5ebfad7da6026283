"""The command demo stream: events come, a model trains on them and is served, all on one page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import PATH, format_arguments
from freescale.launch.ranks import LAUNCHER

_USERS, _ITEMS = 2000, 1000
_PAUSE = 0.5  # seconds between two files of events
SETTINGS: dict[str, Any] = {
    "rows": "item=dynamic:100K", "deltas": "window", "full_every": 20, "width": 32, "layers": 2,
    "max_length": 50, "global_batch": 128, "lr": 1e-2, "row_lr": 1e-2, "dropout": 0.0,
    "log_every": 20, "trace_steps": 0, "profile_steps": 0,
}  # fmt: skip


@click.command()
@click.option("--seconds", type=click.IntRange(1), default=120, show_default=True, help="how long")
@click.option("--rate", type=click.IntRange(1), default=200, show_default=True, help="events/s")
@click.option("--window", default="10s", show_default=True, help="of events, that are trained")
@click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True)
@click.option(
    "--folder", type=PATH, help="of the events and the run  [default: runs/demo-stream-DATE-TIME]"
)
@exit_cleanly
def stream(seconds: int, rate: int, window: str, port: int, folder: Path | None) -> int:
    """Train and serve on events that keep coming, and watch it on a page.

    Generates events, follows them with `train --follow --deltas`, serves the model with
    `serve --follow`, and shows both at http://127.0.0.1:PORT. Ends by itself.
    """
    from freescale.train.run_folder import new_folder

    for number in (signal.SIGINT, signal.SIGTERM):  # also if the shell ignores one of them
        signal.signal(number, signal.default_int_handler)
    name = datetime.now().strftime("demo-stream-%Y-%m-%d-%H%M%S")
    demo = StreamDemo(folder or new_folder(Path("runs") / name), rate)
    with demo.show(port) as address:
        click.echo(f"watch it: {address}  ({seconds} s)")
        demo.run(seconds, window)
    click.echo(f"{demo.figures['sent']:,} events came; see freescale report {demo.folder / 'run'}")
    return 0


class Sender:
    """Users walk through the items, each with a stride of its own kind: what comes next can be
    learned. Moves a file of events into a folder every moment."""

    def __init__(self, folder: Path, rate: float, users: int = _USERS, items: int = _ITEMS) -> None:
        import numpy as np

        self._random = np.random.default_rng(0)
        self._folder, self._rate, self._items = folder, rate, items
        self._places = self._random.integers(0, items, users)
        self.sent, self._until = 0, time.time()
        folder.mkdir(parents=True)

    def send(self) -> None:
        """The events since the last call."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        now = time.time()
        count = int(self._rate * (now - self._until))
        times = np.sort(self._random.uniform(self._until, now, count))
        users = self._random.integers(0, len(self._places), count)
        items = []
        for user in users.tolist():
            self._places[user] = (self._places[user] + 1 + user % 3) % self._items
            items.append(f"item-{self._places[user]}")
        columns = {"user_id": [f"user-{user}" for user in users], "item_id": items}
        path = self._folder / f"{self.sent:012d}.parquet"
        table = pa.table(columns | {"timestamp": (1000 * times).astype(np.int64)})
        pq.write_table(table, part := self._folder.parent / "events.part")
        part.rename(path)
        self.sent, self._until = self.sent + count, now


class StreamDemo:
    """Events, a trainer and a server. `figures`: what the page shows besides the run's log."""

    def __init__(self, folder: Path, rate: int) -> None:
        self.folder, self._run = folder, folder / "run"
        self._sender, self._begin = Sender(folder / "events", rate), time.time()
        self.figures: dict[str, Any] = {}
        self._stop = threading.Event()

    def run(self, seconds: float, window: str) -> None:
        """ValueError if the trainer or the server ends by itself."""
        given = {"follow": self.folder / "events", "folder": self._run, "window": window}
        train = ["train", *format_arguments(SETTINGS | given)]
        serve = ["serve", str(self._run), "--follow", "--port", "0", "--no-access-log"]
        ends, log = time.monotonic() + seconds, self.folder / "serve.log"
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        try:
            with begin_command(train, self.folder / "train.log") as trainer:
                self._await(lambda: any(self._run.glob("deltas/*.full")), ends, trainer)
                with begin_command(serve, log) as server:
                    self._await(lambda: find_address(log), ends, trainer, server)
                    if (address := find_address(log)) is not None:
                        self._await(lambda: self._look(address), ends, trainer, server)
        finally:
            self._stop.set()
            sender.join()

    def _send(self) -> None:
        while not self._stop.wait(_PAUSE):
            self._sender.send()

    def _await(self, done: Any, ends: float, *processes: subprocess.Popen[bytes]) -> None:
        while time.monotonic() < ends and not done():
            if any(process.poll() is not None for process in processes):
                raise ValueError(f"training or serving ended early: {self.folder}/*.log says why")
            self.figures |= {"sent": self._sender.sent, "seconds": time.time() - self._begin}
            part = self.folder / "figures.part"
            part.write_text(json.dumps(self.figures))
            part.rename(self.folder / "figures.json")
            time.sleep(_PAUSE)

    def _look(self, address: tuple[str, int]) -> None:
        """Looks at the server, with a user whose next event changes what is recommended."""
        connection = HTTPConnection(*address, timeout=10)
        with suppress(OSError, HTTPException, ValueError):
            event = [f"item-{int(time.time()) % _ITEMS}", int(1000 * time.time())]
            begin = time.perf_counter()
            ask(connection, "/events", {"user": "probe", "events": [event]})
            ask(connection, "/recommend", {"user": "probe", "k": 10})
            self.figures["history_ms"] = 1000 * (time.perf_counter() - begin)
            health = ask(connection, "/healthz")
            trained = (health["version"]["trained_until"] or 0) / 1000
            self.figures |= {"health": health, "model_age": time.time() - trained}
        connection.close()

    @contextmanager
    def show(self, port: int) -> Iterator[str]:
        """Serves the folder inside the block: its index is the page, which reads the rest."""
        page = files("freescale.recommend").joinpath("static", "stream.html").read_bytes()
        (self.folder / "index.html").write_bytes(page)
        try:
            server = ThreadingHTTPServer(
                ("127.0.0.1", port), partial(_Quiet, directory=self.folder)
            )
        except OSError as error:
            raise ValueError(f"port {port}: {error.strerror}; choose another with --port") from None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with server:
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: Any) -> None:
        pass


@contextmanager
def begin_command(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`freescale ...` inside the block; then it gets SIGTERM, as a service would."""
    command = [sys.executable, "-m", "freescale", *arguments]
    with open(log, "wb") as file:
        own = os.environ | {LAUNCHER: str(os.getpid())}  # it ends with us, even if we are killed
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=own)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def find_address(log: Path) -> tuple[str, int] | None:
    """Where a server listens, by its log."""
    found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
    return None if found is None else ("127.0.0.1", int(found[1]))


def ask(connection: HTTPConnection, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that a server answers. ValueError if it refuses."""
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    if answer.status != 200:
        raise ValueError(f"{path} answered {answer.status}: {found}")
    return found
