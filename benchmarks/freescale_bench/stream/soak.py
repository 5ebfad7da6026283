"""A long stream from a folder, and a server that follows the run: what the two hold does not grow,
and the run does not fall behind."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any

from freescale.cli.demo_stream import ask, begin_command, find_address
from freescale_bench.common.repository import package_path
from freescale_bench.common.results import (
    Destination,
    Row,
    at_most,
    show_claims,
    write,
)
from freescale_bench.stream.events import make_events, write_file

_EACH = 5000  # events of a file; two files are a window
_USERS, _ITEMS = 5000, 3000
_WAITING = 3  # files that wait to be trained, at most: the sender is as fast as the run
_REQUESTS = 20  # to the server after each window: events and recommendations
_WARM_UP = 0.3  # of the windows
_LEAST_WINDOWS, _PATIENCE_S = 10, 900
_MEMORY, _LAG_S = 2.0, 60.0  # targets: % of growth; seconds


def bench_soak(events: int, seed: int, trial: bool, to: Destination) -> None:
    each = 200 if trial else _EACH
    windows = max(_LEAST_WINDOWS, events // (2 * each)) if not trial else 8
    with tempfile.TemporaryDirectory(prefix="stream-") as folder:
        rows = _run(windows, each, seed, Path(folder))
    warm = rows[int(_WARM_UP * len(rows)) :]
    third = max(1, len(warm) // 3)
    first, last = warm[:third], warm[-third:]

    def grown(key: str) -> float:
        """Of the most at a time: segments of the store come and go."""
        before, after = (max(row[key] for row in part) for part in (first, last))
        return float(after - before)

    memory = {}
    # between changes of version, while the server holds one
    for name, cut in (("own_bytes", 1), ("server_bytes", 0)):
        before, after = (
            statistics.quantiles([row[name] for row in part], n=4)[cut] for part in (first, last)
        )
        memory[name] = 100 * (after / before - 1)
    size = f"{sum(row['events'] for row in rows):,} events, after the first {_WARM_UP:.0%}: "
    claims = [
        at_most(f"{size}growth of the run's own memory", _MEMORY, memory["own_bytes"], "%"),
        at_most(f"{size}growth of the server's own memory", _MEMORY, memory["server_bytes"], "%"),
        at_most(f"{size}more open files", 0, grown("open_files"), "files"),
        at_most(f"{size}more files in its folder", 0, grown("files"), "files"),
        at_most(f"{size}more threads and processes", 0, grown("tasks"), "tasks"),
        at_most(f"{size}more processes of the server", 0, grown("server_processes"), "processes"),
        at_most(
            f"{size}longest time from a window's last file to its training", _LAG_S,
            max(row["lag"] for row in warm), "s",
        ),
    ]  # fmt: skip
    if trial:
        show_claims(claims)
        return
    command = f"freescale bench stream soak --events {events} --seed {seed}"
    write("stream-soak", "cpu", command, rows, claims, ["numpy", "pyarrow"], to=to)


def _run(windows: int, each: int, seed: int, folder: Path) -> list[Row]:
    """A row for each window that was trained."""
    (folder / "in").mkdir()
    command = [
        sys.executable, "-m", "freescale", "train", "--follow", str(folder / "in"), "--folder",
        str(folder / "run"), "--rows", "item=dynamic:8192,action=dynamic:64", "--window", "1h",
        "--lateness", "10min", "--event-id", "event", "--event-id-windows", "4", "--max-length",
        "50", "--width", "16", "--layers", "1", "--heads", "1", "--global-batch", "256",
        "--negatives", "256", "--device", "cpu", "--cache", str(folder / "cache"),
        "--full-every", "4", "--deltas", "window",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "wb") as log:
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        with ExitStack() as stack:
            return _watch(run, stack, windows, each, seed, folder)
    except OSError as error:
        raise OSError(f"{error}: {(folder / 'log').read_text()[-500:]}") from None
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
        run.wait()


def _watch(
    run: subprocess.Popen[bytes], stack: ExitStack, windows: int, each: int, seed: int, folder: Path
) -> list[Row]:
    """Starts the server, until the end of `stack`, when there is a model to serve."""
    rows: list[Row] = []
    serve = ["serve", str(folder / "run"), "--follow", "--port", "0", "--no-access-log"]
    server: subprocess.Popen[bytes] | None = None
    sent, path = 0, folder / "run" / "metrics.jsonl"
    place, heard = 0, time.monotonic()
    while len(rows) < windows - 1:
        # two windows are not over: of the last file, and of the lateness
        while sent < 2 * windows + 2 and sent < 2 * len(rows) + 4 + _WAITING:
            table = _make_file(sent, each, seed)
            write_file(folder / "in", sent, table)
            sent += 1
            if sent > 40:  # as a user would, who has trained them
                (folder / "in" / f"{sent - 40:06}.parquet").unlink(missing_ok=True)
        time.sleep(0.02)
        if server is None and any((folder / "run" / "deltas").glob("*.full")):
            server = stack.enter_context(begin_command(serve, folder / "serve.log"))
        if server is not None and server.poll() is not None:
            raise OSError(f"the server ended: {(folder / 'serve.log').read_text()[-500:]}")
        if run.poll() is not None or time.monotonic() - heard > _PATIENCE_S:
            raise OSError(f"the run ended with status {run.poll()}, or made no progress")
        if not path.exists():
            continue
        with open(path, "rb") as file:
            file.seek(place)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        place += len(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            if "stream" in entry:
                heard = time.monotonic()
                _ask_server(folder / "serve.log", len(rows), seed)
                rows.append(
                    _measure(run.pid, server.pid if server else None, folder, entry["stream"])
                )
                if len(rows) % 10 == 0:
                    print(rows[-1], flush=True)
    return rows


def _make_file(number: int, each: int, seed: int) -> Any:
    """Half a window of events."""
    table = make_events(1, each, _USERS, _ITEMS, seed + number)
    times = table.column("timestamp").to_numpy()
    base = times.min() - times.min() % 3600
    return table.set_column(2, "timestamp", [base + (times - base) // 2 + 1800 * number])


def _ask_server(log: Path, number: int, seed: int) -> None:
    """Posts events of some users, and asks for their recommendations."""
    address = find_address(log) if log.exists() else None
    if address is None:
        return
    connection, random = HTTPConnection(*address, timeout=60), Random(seed + number)
    for _ in range(_REQUESTS):
        user = f"user-{random.randrange(_USERS)}"
        event = [f"item-{random.randrange(_ITEMS)}", int(time.time()), random.choice([1, 2, 4])]
        ask(connection, "/events", {"user": user, "events": [event]})
        ask(connection, "/recommend", {"user": user, "k": 10})
    connection.close()


def _read_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)


def _list_children(pid: int) -> list[int]:
    """Those that it has started and theirs; one may end meanwhile."""
    found = [pid]
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        of = [int(child) for task in tasks for child in task.read_text().split()]
        found += [each for child in of for each in _list_children(child)]
    return found


def _measure_server(pid: int | None) -> Row:
    own = 0
    processes = [] if pid is None else _list_children(pid)
    for process in processes:
        with suppress(OSError, KeyError):  # it has ended
            own += int(_read_status(process)["RssAnon"].split()[0]) * 1024
    return {"server_bytes": own, "server_processes": len(processes)}


def _measure(pid: int, server: int | None, folder: Path, window: Row) -> Row:
    status = _read_status(pid)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _measure_server(server) | {
        "window": window["number"],
        "events": window["events"],
        "lag": window["lag"],
        "own_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        "files": sum(len(files) for _, _, files in os.walk(folder / "run")),
        "tasks": int(status["Threads"]) + len(children),
    }
