"""A long stream from a folder: what the run holds does not grow, and it does not fall behind."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from freescale_bench.common.repository import package_path
from freescale_bench.common.results import (
    Destination,
    Row,
    at_most,
    show_claims,
    write,
)
from freescale_bench.stream.events import make_events, write_file

_EACH = 500  # events of a file; two files are a window
_USERS, _ITEMS = 5000, 3000
_WAITING = 3  # files that wait to be trained, at most: the sender is as fast as the run
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

    before, after = (statistics.median(row["own_bytes"] for row in part) for part in (first, last))
    memory = 100 * (after / before - 1)
    size = f"{sum(row['events'] for row in rows):,} events, after the first {_WARM_UP:.0%}: "
    claims = [
        at_most(f"{size}growth of the run's own memory", _MEMORY, memory, "%"),
        at_most(f"{size}more open files", 0, grown("open_files"), "files"),
        at_most(f"{size}more files in its folder", 0, grown("files"), "files"),
        at_most(f"{size}more threads and processes", 0, grown("tasks"), "tasks"),
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
        "--full-every", "4",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "wb") as log:
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        return _watch(run, windows, each, seed, folder)
    except OSError as error:
        raise OSError(f"{error}: {(folder / 'log').read_text()[-500:]}") from None
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
        run.wait()


def _watch(
    run: subprocess.Popen[bytes], windows: int, each: int, seed: int, folder: Path
) -> list[Row]:
    rows: list[Row] = []
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
                rows.append(_measure(run.pid, folder, entry["stream"]))
    return rows


def _make_file(number: int, each: int, seed: int) -> Any:
    """Half a window of events."""
    table = make_events(1, each, _USERS, _ITEMS, seed + number)
    times = table.column("timestamp").to_numpy()
    base = times.min() - times.min() % 3600
    return table.set_column(2, "timestamp", [base + (times - base) // 2 + 1800 * number])


def _measure(pid: int, folder: Path, window: Row) -> Row:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {
        "window": window["number"],
        "events": window["events"],
        "lag": window["lag"],
        "own_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        "files": sum(path.is_file() for path in (folder / "run").rglob("*")),
        "tasks": int(status["Threads"]) + len(children),
    }
