"""How fresh recommendations are: events come, a run follows them, and a server follows the run, all
on this machine.

history   from POST /events until an answer has changed
model     from an event until a model that was trained on it is served"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from freescale.cli.demo_stream import SETTINGS, Sender, ask, begin_command, find_address
from freescale.cli.options import format_arguments
from freescale_bench.common.results import Destination, at_least, at_most, show_claims, write

_HISTORY, _MODEL = 100.0, 75.0  # targets: ms, s
_RATE, _WINDOW = 500, 30  # events/s, s
_PROBES = 5  # a second
_USERS = 2000


def bench_freshness(windows: int, trial: bool, to: Destination) -> None:
    window, rate = (4, 100) if trial else (_WINDOW, _RATE)
    with tempfile.TemporaryDirectory() as folder:
        rows, history, model = _measure(Path(folder), windows, window, rate)
    claims = [
        at_most("a recommendation has changed after POST /events, p99", _HISTORY, history, "ms"),
        at_most("a model that was trained on an event is served, p99", _MODEL, model, "s"),
        at_least("events/s", 0.98 * rate, rows[0]["events_per_second"], "/s"),
        at_most("answers that an event did not change", 0, rows[1]["unchanged"], "answers"),
    ]
    if trial:
        show_claims(claims)
        return
    command = f"freescale bench stream freshness --windows {windows}"
    write("stream-freshness", "cpu", command, rows, claims, ["numpy", "pyarrow"], to=to)


def _measure(
    folder: Path, windows: int, window: int, rate: int
) -> tuple[list[dict[str, Any]], float, float]:
    run, sender = folder / "run", Sender(folder / "events", rate, _USERS)
    given = {"follow": folder / "events", "folder": run, "window": f"{window}s"}
    begin, stop = time.time(), threading.Event()
    sending = threading.Thread(target=_send, args=(sender, stop), daemon=True)
    sending.start()
    try:
        train = ["train", *format_arguments({**SETTINGS, **given, "device": "cpu"})]
        with begin_command(train, folder / "train.log") as trainer:
            _wait(lambda: any(run.glob("deltas/*.full")), trainer)
            serve = ["serve", str(run), "--follow", "--port", "0", "--no-access-log"]
            with begin_command([*serve, "--device", "cpu"], folder / "serve.log") as server:
                _wait(lambda: find_address(folder / "serve.log") is not None, trainer, server)
                address = find_address(folder / "serve.log")
                assert address is not None
                history, versions = _probe(address, windows, (trainer, server))
    finally:
        stop.set()
        sending.join()
    seconds = time.time() - begin
    model = _list_model(versions)
    rows = [
        {"measured": "load", "events_per_second": sender.sent / seconds, "seconds": seconds,
         "window_seconds": window, "width": SETTINGS["width"], "layers": SETTINGS["layers"],
         "max_length": SETTINGS["max_length"], "cores": os.cpu_count()},
        {"measured": "history", "probes": len(history), "per_second": _PROBES,
         "unchanged": sum(not changed for _, changed in history),
         "ms": _cut([ms for ms, _ in history])},
        {"measured": "model", "versions": len(versions), "seconds": _cut(model)},
        *({"version": number, "trained_until": until, "served": at, "swap_seconds": swap}
          for number, until, at, swap in versions),
    ]  # fmt: skip
    return rows, rows[1]["ms"]["p99"], rows[2]["seconds"]["p99"]


def _send(sender: Sender, stop: threading.Event) -> None:
    while not stop.wait(0.5):
        sender.send()


def _wait(done: Any, *processes: Any) -> None:
    end = time.monotonic() + 600
    while not done():
        if time.monotonic() > end or any(each.poll() is not None for each in processes):
            raise ValueError("training or serving ended early, or did not begin in 600 s")
        time.sleep(0.2)


Version = tuple[int, float, float, float]  # number, trained until, served at, seconds of the swap


def _probe(
    address: tuple[str, int], windows: int, processes: Sequence[Any]
) -> tuple[list[tuple[float, bool]], list[Version]]:
    """Posts events of one user after another, until some versions have come."""
    connection, found = HTTPConnection(*address, timeout=60), list[tuple[float, bool]]()
    versions: dict[int, Version] = {}
    random, following = np.random.default_rng(0), time.monotonic()
    while len(versions) <= windows:
        _wait(lambda: True, *processes)
        if any(process.poll() is not None for process in processes):
            raise ValueError("training or serving ended early")
        health = ask(connection, "/healthz")
        version = health["version"]
        until, served = version["trained_until"] / 1000, version["served"]
        swap = sum(health["seconds"].values())
        versions.setdefault(version["number"], (version["number"], until, served, swap))
        user = f"user-{random.integers(0, _USERS)}"
        event = [f"item-{random.integers(0, 1000)}", int(1000 * time.time())]
        ask(connection, "/events", {"user": user, "events": [event]})
        before = ask(connection, "/recommend", {"user": user, "k": 10})
        other = [f"item-{random.integers(0, 1000)}", int(1000 * time.time())]
        begin = time.perf_counter()
        ask(connection, "/events", {"user": user, "events": [other]})
        after = ask(connection, "/recommend", {"user": user, "k": 10})
        found.append((1000 * (time.perf_counter() - begin), before["items"] != after["items"]))
        following = max(following + 1 / _PROBES, time.monotonic())
        time.sleep(max(0.0, following - time.monotonic()))
    connection.close()
    return found, list(versions.values())


def _list_model(versions: Sequence[Version]) -> list[float]:
    """Seconds from each event until it is in a model that is served; events come evenly. Those
    before the second version are left out: the first one waited for the server to begin."""
    found = np.zeros(0)
    for before, now in zip(versions[1:], versions[2:], strict=False):
        times = np.arange(before[1], now[1], 0.05)
        found = np.concatenate([found, now[2] - times])
    return found.tolist()


def _cut(values: Sequence[float]) -> dict[str, float]:
    cuts = np.percentile(values, [50, 99, 100])
    return dict(zip(("median", "p99", "max"), cuts.round(3).tolist(), strict=True))
