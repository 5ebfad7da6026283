"""Kills runs that follow a source, at random moments, until they have trained all windows."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.config import RunConfig
from freescale.data import hash_ids
from freescale.data.store.event_store import EventStore
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport
from freescale_bench.common.repository import package_path
from freescale_bench.common.results import Destination, Row, at_most, show_claims, write
from freescale_bench.stream import events

_LONGEST_S = 2.0  # of an attempt, at first
_MOST = 25  # kills of a run, after which it goes on undisturbed
_PATIENCE_S = 600
_LATENESS_S = 60  # of events, that windows wait for


def bench_kills(source: str, kills: int, seed: int, trial: bool, to: Destination) -> None:
    """Runs under kills, one after another, until there were enough of them."""
    windows, each, files = (6, 30, 12) if trial else (30, 60, 100)
    kills = 2 if trial else kills
    rows: list[Row] = []
    while sum(row["kills"] for row in rows) < kills:
        with tempfile.TemporaryDirectory(prefix="stream-") as folder:
            row = _run(source, windows, each, files, seed + len(rows), Path(folder))
        rows.append(row)
        print(row, flush=True)
    total = sum(row["kills"] for row in rows)
    followed = "a folder" if source == "folder" else "a Kafka topic"
    what = f"{total} kills at random moments, following {followed}: "
    claims = [
        at_most(f"{what}{name}", 0, sum(row[key] for row in rows), unit)
        for name, key, unit in (
            ("weights, rows or optimizer states that differ", "different", "tensors"),
            ("events that were lost", "lost", "events"),
            ("events that were trained twice", "doubled", "events"),
        )
    ]
    if trial:
        show_claims(claims)
        return
    command = f"freescale bench stream kills --source {source} --kills {kills} --seed {seed}"
    packages = ["numpy", "pyarrow", *(["confluent-kafka"] * (source == "kafka"))]
    write(f"stream-kills-{source}", "cpu", command, rows, claims, packages, to=to)


def _run(source: str, windows: int, each: int, files: int, seed: int, folder: Path) -> Row:
    """One run under kills, and the same one without."""
    trained = windows - 2
    with _sending(source, windows, each, files, seed, folder) as address:
        settings = {"follow": address, "windows": trained, "cache": str(folder / "cache")}
        moments, begun = np.random.default_rng(seed), time.monotonic()
        count, longest = 0, _LONGEST_S
        while True:
            child = _fork(lambda: _train(settings, folder / "run"), folder / "run.log")
            rest = _PATIENCE_S if count == _MOST else float(moments.uniform(0, longest))
            if _ended(child, rest, folder / "run.log"):
                break
            count += 1
            # a busy machine starts slowly: kills are to come at all stages
            made = folder / "run" / "metrics.jsonl"
            longest *= 1.0 if made.exists() and time.time() - made.stat().st_mtime < 4 else 1.15
            if time.monotonic() - begun > 2 * _PATIENCE_S:
                raise OSError(f"the run did not end: {(folder / 'run.log').read_text()[-500:]}")
        seconds = time.monotonic() - begun
        calm = _fork(lambda: _train(settings, folder / "calm"), folder / "calm.log")
        if not _ended(calm, _PATIENCE_S, folder / "calm.log"):
            raise OSError(f"the undisturbed run did not end in {_PATIENCE_S} s")
        found, expected = (_read(settings, folder / name, folder) for name in ("run", "calm"))
    different = [n for n in expected["bits"] if found["bits"].get(n) != expected["bits"][n]]
    assigned = events.assign(source, windows, each, files, seed, _LATENESS_S)
    early = [event for event, window in assigned.items() if window < trained]
    ids, have = Counter(hash_ids(early).tolist()), Counter(found["ids"])
    numbers = Counter(found["windows"])
    return {
        "source": source,
        "seed": seed,
        "windows": trained,
        "events": sum(ids.values()),
        "kills": count,
        "longest_attempt": longest,
        "seconds": seconds,
        "tensors": len(expected["bits"]),
        "different": len(different) + len(found["bits"].keys() - expected["bits"].keys()),
        "lost": sum((ids - have).values()) + each * sum(n not in numbers for n in range(trained)),
        "doubled": sum((have - ids).values()) + each * sum(c - 1 for c in numbers.values()),
        "late": found["late"],
        "duplicates": found["duplicates"],
        "repeated": found["repeated"],
    }


@contextmanager
def _sending(
    source: str, windows: int, each: int, files: int, seed: int, folder: Path
) -> Iterator[str]:
    """The source while a process of its own sends events to it."""
    incoming = folder / "in"
    incoming.mkdir()
    arguments = [source, str(incoming), *map(str, (windows, each, files, seed, 0.1))]
    environment = {**os.environ, "PYTHONPATH": package_path()}
    command = [sys.executable, "-m", events.__name__, *arguments]
    sender = subprocess.Popen(command, env=environment)
    try:
        if source == "folder":
            yield str(incoming)
            return
        end = time.monotonic() + 120
        while not (incoming / "address").exists():
            if time.monotonic() > end:
                raise OSError("the mock cluster did not start")
            time.sleep(0.05)
        yield f"kafka://{(incoming / 'address').read_text()}/events"
    finally:
        sender.kill()
        sender.wait()


def _configure(settings: dict[str, Any]) -> RunConfig:
    return RunConfig.from_settings(
        {
            "rows": "item=dynamic:4096:seen=2,action=dynamic:64", "window": "1h",
            "lateness": f"{_LATENESS_S}s", "event_id": "event", "max_length": 20, "width": 8,
            "layers": 1, "heads": 1, "global_batch": 16, "negatives": 16, "device": "cpu",
            "full_every": 5, "trace_steps": 0, "profile_steps": 0, "log_every": 1000,
            "precision": "fp32",
        }
        | settings
    )  # fmt: skip


def _train(settings: dict[str, Any], folder: Path) -> None:
    config = _configure(settings)
    Trainer(config, folder, resume="auto", transport=LocalTransport()).train()


def _read(settings: dict[str, Any], run: Path, work: Path) -> dict[str, Any]:
    """What a run has trained, from its folder, read by a process of its own."""

    def read() -> None:
        trainer = Trainer(_configure(settings), run, resume=True, transport=LocalTransport())
        store = EventStore(run / "stream" / "store")
        assert trainer.follower is not None
        last = trainer.follower.window["to"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        windows = [line["stream"] for line in lines if "stream" in line]
        ids: list[int] = []
        for segment in store.segments:
            early = segment.column("timestamp") < last
            ids += segment.column("event_id")[early].tolist()
        found = {"bits": sum_tensors(trainer), "ids": ids}
        found |= {"windows": [window["number"] for window in windows]}
        for key in ("late", "duplicates", "repeated"):
            found[key] = sum(window[key] for window in windows)
        (work / "read.pickle").write_bytes(pickle.dumps(found))

    if not _ended(_fork(read, log := work / "read.log"), _PATIENCE_S, log):
        raise OSError(f"{run} cannot be read")
    result: dict[str, Any] = pickle.loads((work / "read.pickle").read_bytes())
    return result


def sum_tensors(trainer: Trainer) -> dict[str, str]:
    """A digest of each tensor of a run on one rank: rows in the order of their ids."""
    found: dict[str, torch.Tensor] = dict(trainer.model.module.named_parameters())
    for number, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{key}": torch.as_tensor(v) for key, v in state.items()}
    for name in trainer.model.tables.specs:
        rows: Any = trainer.model.tables.get_group(name).rows
        tensors = rows.get_tensors(name)
        used = tensors["last_use"] >= 0
        order = tensors["ids"][used].argsort()
        found |= {f"{name}.{part}": values[used][order] for part, values in tensors.items()}
        found |= {f"{name}.{part}": values for part, values in rows.get_shard_tensors().items()}
    return {
        name: hashlib.sha256(pickle.dumps(values.detach().contiguous().numpy())).hexdigest()
        for name, values in found.items()
    }


def _fork(work: Callable[[], None], log: Path) -> int:
    """Runs something in a process forked from this one, which has imported torch and has no
    threads."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(descriptor, number)
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException as error:  # noqa: BLE001 - of a process that ends here
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _ended(child: int, seconds: float, log: Path) -> bool:
    """Whether the process ends by itself in this time, without an error; else it is killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if status:
                code = os.waitstatus_to_exitcode(status)
                raise OSError(f"a run failed with status {code}: {log.read_text()[-1000:]}")
            return True
        time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
