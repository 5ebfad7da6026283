"""Training from a store with latency and errors, against a disk: the first batch of four ranks,
losses, a resume, an export, and how long steps wait for input."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from freescale.data import generate
from freescale.stores.calls import get_pool
from freescale.stores.path import StorePath, as_path, upload
from freescale_bench.common.repository import package_path
from freescale_bench.common.results import Destination, Row, at_least, at_most, show_claims, write
from freescale_bench.stores.s3_server import BUCKET, ERRORS, LATENCY_S, run_s3

_FILES, _GROUPS, _USERS = 100, 4, 100  # row groups of a file, users of a row group
_RANKS, _TURNS = 4, 3
_STEPS, _RESUMED = 40, 80
_FIRST_S, _COPIED, _WAIT = 10.0, 1.0, 5.0  # targets: seconds, %, % of a step
_MODEL = ["--width", "64", "--layers", "2", "--max-length", "200", "--global-batch", "64"]
_MODEL += ["--split", "none"]  # nothing is evaluated


def bench_training(folder: Path, trial: bool, to: Destination) -> None:
    files, steps, resumed = (8, 4, 8) if trial else (_FILES, _STEPS, _RESUMED)
    folder.mkdir(parents=True)
    try:
        size = _write_histories(folder, files)
        with run_s3(LATENCY_S, ERRORS) as server, _work_in(folder):
            root = StorePath(f"s3://{BUCKET}")
            data = root / "data"
            paths = sorted((folder / "histories").iterdir())
            list(get_pool().map(upload, paths, [data / path.name for path in paths]))
            rows = _time_first(str(data), size, folder)
            before = server.read_statistics()
            disk = str(folder / "histories"), str(folder / "run"), str(folder / "out")
            stored = str(data), str(root / "run"), str(root / "out")
            runs = [
                _train("disk", *disk, steps, resumed),
                _train("store", *stored, steps, resumed),
            ]
            after = server.read_statistics()
            errors = {name: after[name] - before[name] for name in after}
            same = _compare(folder, root)
    finally:
        shutil.rmtree(folder)
    uniform = [row for row in rows if row["negatives"] == "uniform"]
    where = f"{LATENCY_S * 1000:.0f} ms, {ERRORS:.0%} errors"
    succeeded = sum(status == 0 for status in runs[1]["statuses"])
    claims = [
        at_most(
            f"{files} files in S3 ({where}), {_RANKS} ranks: first batch, after start", _FIRST_S,
            statistics.median(row["seconds"] for row in uniform), "s",
        ),
        at_most(
            "of that, after the libraries are imported", _FIRST_S,
            statistics.median(row["after_import_s"] for row in uniform), "s",
        ),
        at_most(
            "bytes on disk by then, to those of the data", _COPIED,
            max(row["kept_percent"] for row in uniform), "%",
        ),
        at_least(f"train, resume and export in S3 ({where}): successes", 3, succeeded, "commands"),
        at_most("losses that differ from those on a disk", 0, same["losses"], "steps"),
        at_most("files of the export that differ", 0, same["files"], "files"),
        at_most("input wait, with readahead", _WAIT, runs[1]["wait_percent"], "% of a step"),
    ]  # fmt: skip
    if trial:
        show_claims(claims)
        return
    command, packages = "freescale bench stores training", ["pyarrow", "s3fs", "moto"]
    rows = [*rows, *runs, {**same, **errors}]
    write("stores-training", "cpu", command, rows, claims, packages, to=to)


def _write_histories(folder: Path, files: int) -> int:
    """Writes them as another program would. Returns their bytes."""
    each = _GROUPS * _USERS
    generate(folder / "all.parquet", users=files * each, items=20_000, median=50, cap=2000, seed=1)
    table = pq.read_table(folder / "all.parquet").replace_schema_metadata(None)
    (folder / "histories").mkdir()
    for number in range(files):
        path = folder / "histories" / f"part-{number:05d}.parquet"
        pq.write_table(table.slice(number * each, each), path, row_group_size=_USERS)
    (folder / "all.parquet").unlink()
    return sum(path.stat().st_size for path in (folder / "histories").iterdir())


@contextmanager
def _work_in(folder: Path) -> Iterator[None]:
    """A working folder and a cache of its own."""
    before, cache = Path.cwd(), os.environ.get("XDG_CACHE_HOME")
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.pop("XDG_CACHE_HOME")
        os.environ |= {} if cache is None else {"XDG_CACHE_HOME": cache}


def _time_first(data: str, size: int, folder: Path) -> list[Row]:
    """The last of four ranks to have its first batch. `popularity` counts the items, the first
    time."""
    rows = []
    for turn in range(_TURNS):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        for negatives in ("uniform", "popularity", "popularity, counted before"):
            source = negatives.partition(",")[0]
            begun = time.time()
            ranks = [_start(__name__, str(rank), data, source) for rank in range(_RANKS)]
            times = [
                [float(word) - begun for word in rank.communicate()[0].split()] for rank in ranks
            ]
            imported, seconds = (max(each) for each in zip(*times, strict=True))
            after = max(last - first for first, last in times)
            kept = sum(p.stat().st_size for p in (folder / "cache").rglob("*") if p.is_file())
            about = {"turn": turn, "negatives": negatives, "seconds": seconds}
            about |= {"imported_s": imported, "after_import_s": after}
            rows.append({**about, "kept_bytes": kept, "kept_percent": 100 * kept / size})
            print(rows[-1], flush=True)
    return rows


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": package_path()}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _make_first(rank: int, data: str, source: str) -> None:
    """Makes the first batch of a rank, and prints when it was there."""
    from freescale.data import Histories, NegativeSpec

    imported = time.time()
    negatives = NegativeSpec(source=source, per="batch")
    Histories(data, 512, rank=rank, world=_RANKS, negatives=negatives).batch(0)
    print(imported, time.time(), flush=True)
    os._exit(0)  # without waiting for what was requested ahead


def _train(arm: str, data: str, run: str, out: str, steps: int, resumed: int) -> Row:
    """Trains, resumes and exports."""
    more = ["--device", "cpu", "--nproc", "2", "--log-every", "1", "--checkpoint-every", "20"]
    commands: Sequence[Sequence[str]] = (
        ["train", "--data", data, "--folder", run, *_MODEL, *more, "--steps", str(steps)],
        ["train", "--folder", run, "--resume", "--nproc", "2", "--steps", str(resumed)],
        ["export", run, "--out", out],
    )
    statuses, seconds = [], []
    for command in commands:
        begun = time.perf_counter()
        process = _start("freescale", *command)
        process.communicate()
        statuses.append(process.returncode)
        seconds.append(time.perf_counter() - begun)
    ledger: dict[str, Any] = json.loads((as_path(run) / "ledger.json").read_text())
    step, wait = ledger["step_ms"]["mean"], ledger["spans_ms"].get("await batch", 0.0)
    row = {"arm": arm, "statuses": statuses, "seconds": seconds, "step_ms": step}
    row |= {"wait_ms": wait, "wait_percent": 100 * wait / step}
    print(row, flush=True)
    return row


def _compare(folder: Path, root: Path) -> dict[str, int]:
    """Steps with another loss, and files of the export with other bytes."""
    logs = []
    for run in (folder / "run", root / "run"):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        logs.append({line["step"]: line["loss"] for line in lines if "loss" in line})
    losses = sum(logs[0].get(step) != logs[1].get(step) for step in logs[0] | logs[1])
    names = {path.name for out in (folder, root) for path in (out / "out").iterdir()}
    names -= {"config.json"}  # names the data
    both = [[out / "out" / name for out in (folder, root)] for name in sorted(names)]
    files = sum(not b.exists() or a.read_bytes() != b.read_bytes() for a, b in both)
    return {"compared_steps": len(logs[0]), "losses": losses, "files": files}


if __name__ == "__main__":
    _make_first(int(sys.argv[1]), *sys.argv[2:])
