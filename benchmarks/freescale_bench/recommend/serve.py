"""`freescale serve` under load: latency at a rate and at five times that rate, memory over time,
hostile bodies. The server is a process; wrk sends the requests from this machine."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from freescale_bench.common.results import Destination, Row, at_least, at_most, write
from freescale_bench.recommend.hostile import make_request
from freescale_bench.recommend.synthetic import write_export

RATE, MORE = 200, 5  # requests/s; overload
CONNECTIONS = 128  # for RATE, each with as many pauses
P99, P99_OVERLOAD, GROWTH = 50.0, 100.0, 5.0  # ms, ms, percent: targets
SAMPLES = 10  # of memory, after the first fifth of the time


@dataclass(frozen=True)
class Shape:
    items: int = 100_000
    events: int = 200
    width: int = 64
    layers: int = 2
    seconds: int = 30  # of each load
    soak: int = 600
    bodies: int = 10_000


TRIAL = Shape(items=1000, events=10, width=16, layers=1, seconds=2, soak=4, bodies=100)


class Server:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self.process, self._log = process, log
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if found is None:
            raise ValueError(f"the server does not start: {log.read_text()[-2000:]}")
        self.port = int(found[1])

    def load(self, shape: Shape, rate: float, seconds: int, posted: float = 0.0) -> Row:
        """Sends about `rate` requests/s, of which the share `posted` are events of users."""
        connections = max(1, round(CONNECTIONS * rate / RATE))
        pause = 1000 * connections / rate
        script = Path(__file__).with_name("serve.lua")
        command = ["wrk", "-t", 1, "-c", connections, "-d", f"{seconds}s", "-s", script]
        command += [f"http://127.0.0.1:{self.port}", "--", shape.items, shape.events]
        load = os.getloadavg()[0]
        done = subprocess.run(
            [str(word) for word in (*command, pause, posted, 100_000)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found: Row = json.loads(done.stdout.splitlines()[-1])
        sent = sum(found["statuses"].values())
        found["requests_per_second"] = sent / found["seconds"]
        found["accepted_per_second"] = found["statuses"].get("200", 0) / found["seconds"]
        return {"rate": rate, "load_before": load, **found}

    def measure(self, name: str) -> float:
        """A figure of /metrics."""
        text = self.send("GET", "/metrics")[1].decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def read_memory(self) -> float:
        """Resident memory of both processes in MB; what they share counts twice."""
        main = Path(f"/proc/{self.process.pid}")
        children = (main / "task" / main.name / "children").read_text().split()
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in (main.name, *children)]
        return sum(int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) for text in texts) / 1000

    def count_tracebacks(self) -> int:
        return self._log.read_text(errors="replace").count("Traceback")


@contextmanager
def start_server(export: Path, folder: Path) -> Iterator[Server]:
    log = folder / "log"
    options = ["--port", "0", "--no-access-log", "--memory", "2MB"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "freescale", "serve", str(export), *options],
            stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield Server(process, log)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()


def bench_serve(trial: bool, soak: int | None, to: Destination) -> None:
    if shutil.which("wrk") is None:
        raise ValueError("wrk is missing, which sends the requests: apt-get install wrk")
    shape = TRIAL if trial else Shape()
    soak = shape.soak if soak is None else soak
    with tempfile.TemporaryDirectory() as name:
        export = write_export(
            Path(name) / "export", shape.items, shape.events, shape.width, shape.layers
        )
        with start_server(export, Path(name)) as server:
            server.load(shape, RATE, 3)  # warm up
            arms: dict[str, Callable[[], Row]] = {
                "load": lambda: server.load(shape, RATE, shape.seconds),
                "overload": lambda: server.load(shape, MORE * RATE, shape.seconds),
                "hostile": lambda: _send_hostile(server, shape.bodies),
                "soak": lambda: _soak(server, shape, soak),
            }
            rows: list[Row] = []
            for arm, measure in arms.items():
                rows.append({"arm": arm, **measure()})
                print(rows[-1], flush=True)
        rows[-1]["exit_status"] = server.process.returncode
    if trial:
        return
    claims = _make_claims(rows, shape, soak)
    command = "freescale bench recommend serve"
    command += f" --soak {soak}" if soak != shape.soak else ""
    packages = ["starlette", "uvicorn", "httptools", "uvloop"]
    write("recommend-serve", "cpu", command, rows, claims, packages, to=to, model=vars(shape))


def _send_hostile(server: Server, count: int) -> Row:
    statuses: Counter[str] = Counter()
    for seed in range(count):
        path, body = make_request(Random(seed))
        try:
            status, answer = server.send("POST", path, body)
            statuses["traceback" if b"Traceback" in answer else str(status)] += 1
        except (OSError, http.client.HTTPException):
            statuses["no answer"] += 1
    fine = {"200", "400", "404", "413", "503"}  # 503: of the load before
    failed = sum(count for status, count in statuses.items() if status not in fine)
    failed += server.count_tracebacks() + (server.send("GET", "/healthz")[0] != 200)
    return {"bodies": count, "statuses": dict(statuses), "failed": failed}


def _soak(server: Server, shape: Shape, seconds: int) -> Row:
    """Half the load, with events of more users than memory holds."""
    memory: list[float] = []
    queue: list[float] = []

    def sample() -> None:
        time.sleep(seconds / 5)
        for _ in range(SAMPLES):
            memory.append(server.read_memory())
            queue.append(server.measure("freescale_queue_length"))
            time.sleep(0.75 * seconds / SAMPLES)

    sampling = threading.Thread(target=sample)
    sampling.start()
    found = server.load(shape, RATE / 2, seconds, posted=0.3)
    sampling.join()
    figures = ("users", "user_bytes", "users_dropped")
    kept: dict[str, Any] = {name: server.measure(f"freescale_{name}") for name in figures}
    return {**found, "memory_mb": memory, "queue": queue, **kept}


def _make_claims(rows: list[Row], shape: Shape, soak: int) -> list[dict[str, Any]]:
    load, overload, hostile, soaked = rows
    size = f"{shape.items:,} items, histories of {shape.events}"
    memory = soaked["memory_mb"]
    others = {*overload["statuses"]} - {"200", "503"}
    return [
        at_least(f"{size}: accepted requests/s", 0.95 * RATE, load["accepted_per_second"], "/s"),
        at_most(f"{size}: p99 at {RATE} requests/s", P99, load["p99_ms"], "ms"),
        at_most(
            f"p99 of accepted requests at {MORE * RATE}/s, from above", P99_OVERLOAD,
            overload["accepted_p99_ms"], "ms",
        ),
        at_most(
            f"answers at {MORE * RATE}/s that are neither 200 nor 503", 0,
            sum(overload["statuses"][name] for name in others) + overload["errors"], "",
        ),
        at_most(f"failures at {shape.bodies:,} hostile bodies", 0, hostile["failed"], ""),
        at_most(f"memory after {soak} s, growth", GROWTH, 100 * (memory[-1] / memory[0] - 1), "%"),
    ]  # fmt: skip
