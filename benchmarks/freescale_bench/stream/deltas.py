"""Deltas against exports: bits, through eviction, other numbers of ranks and compaction; bytes, if
1 % of the rows change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file

from freescale import Subscriber
from freescale.recommend.export import export_run
from freescale.train.deltas.folder import DeltaFolder
from freescale_bench.common.results import Destination, Row, at_least, at_most, show_claims, write

_DAY, _START = 86_400, 1_699_920_000
_SHARE = 0.01  # of the rows, that change in a window
_MOST = 2.0  # % of the bytes of a full export


def bench_deltas(trial: bool, to: Destination) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bits = _measure_bits(Path(folder) / "bits", trial)
        size = _measure_bytes(Path(folder) / "bytes", trial)
    same = {
        "tensors, tables and files of exports that differ after deltas": bits["differ"],
        "the same, from a full export that was made of deltas": bits["compacted_differ"],
    }
    claims = [at_most(text, 0, value, f"of {bits['compared']}") for text, value in same.items()]
    claims += [
        at_least("ids that lost their rows on the way", 1, bits["removed"], "ids"),
        at_most(
            f"bytes of a delta with {100 * size['changed']:.2f} % of the rows, of a full export",
            _MOST, 100 * size["delta_bytes"] / size["full_bytes"], "%",
        ),
    ]  # fmt: skip
    if trial:
        show_claims(claims)
        return
    command, packages = "freescale bench stream deltas", ["numpy", "pyarrow", "safetensors"]
    write("stream-deltas", "cpu", command, [bits, size], claims, packages, to=to)


def _train(folder: Path, ranks: int, steps: int | None, **settings: object) -> None:
    """Trains a run in order of time, from where it stands, until a step."""
    given = {
        "data": folder / "events.parquet", "cache": folder / "cache", "folder": folder / "run",
        "order": "time", "window": "1d", "layers": 1, "device": "cpu", "placement": "sharded",
        "deltas": "window", "keep_checkpoints": 99, "keep_deltas": 99, "trace_steps": 0,
        "steps": steps, "nproc": ranks, **settings,
    }  # fmt: skip
    words = [sys.executable, "-m", "freescale", "train"]
    for name, value in given.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words += ["--async-checkpoints"]
    words += ["--resume"] if (folder / "run" / "checkpoints").exists() else []
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def _write(path: Path, users: Any, items: Any, times: Any) -> None:
    order = np.argsort(times, kind="stable")
    path.parent.mkdir(parents=True)
    columns = {
        "user_id": [f"user-{n}" for n in users[order]],
        "item_id": [f"item-{n}" for n in items[order]],
        "timestamp": _START + times[order],
    }
    pq.write_table(pa.table(columns), path)


# ---- bits


def _measure_bits(folder: Path, trial: bool) -> Row:
    """Of a run on 1, 2 and 1 ranks; its table has room for half of the items."""
    random, days = np.random.default_rng(0), 5
    count = 3000 if trial else 30_000
    _write(
        folder / "events.parquet", random.integers(0, 300, count),
        random.integers(0, 10_000, count), random.integers(0, days * _DAY, count),
    )  # fmt: skip
    steps = 20 if trial else 60
    given = {
        "rows": "item=dynamic:4096:lru:default=learned", "width": 16, "global_batch": 16,
        "checkpoint_every": steps // 5, "full_every": 3,
    }  # fmt: skip
    for ranks, until in ((1, steps // 3), (2, 2 * steps // 3), (1, steps)):
        _train(folder, ranks, until, **given)
    run, files = folder / "run", DeltaFolder(folder / "run" / "deltas")
    full, deltas = files.list_numbers()
    compared = differ = removed = 0
    kept: set[int] = set()
    for number in [*full, *deltas]:
        later = _set_aside(files, number, folder / "later")
        subscriber = Subscriber(run)
        found = _read(subscriber.write(folder / "found"))
        _put_back(files, later)
        expected = _export(run, subscriber.last.step, folder / "expected")
        now = set(subscriber.load().items.keys.tolist())  # type: ignore[union-attr]
        removed, kept = removed + len(kept - now), now
        compared, differ = compared + len(expected), differ + _count_different(found, expected)
        _remove(folder / "found", folder / "expected")
    later = _set_aside(files, deltas[len(deltas) // 2], folder / "later")
    Subscriber(run).compact()
    _put_back(files, later)
    subscriber = Subscriber(run)
    found = _read(subscriber.write(folder / "found"))
    expected = _export(run, subscriber.last.step, folder / "expected")
    return {
        "measured": "bits", "deltas": len(deltas), "ranks": [1, 2, 1], "compared": compared,
        "differ": differ, "compacted_at": files.list_numbers()[0][-1],
        "compacted_differ": _count_different(found, expected), "removed": removed,
    }  # fmt: skip


def _set_aside(files: DeltaFolder, number: int, to: Path) -> list[Path]:
    """Takes the deltas after a number away."""
    to.mkdir(exist_ok=True)
    later = [files.path(other) for other in files.list_numbers()[1] if other > number]
    return [path.rename(to / path.name) for path in later]


def _put_back(files: DeltaFolder, paths: list[Path]) -> None:
    for path in paths:
        path.rename(files.folder / path.name)


def _export(run: Path, step: int, to: Path) -> dict[str, Any]:
    list(export_run(run, to, str(step)))
    return _read(to)


def _read(folder: Path) -> dict[str, Any]:
    """What an export holds, but for the settings of the run, whose last step changes."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            parts = load_file(path)
            found |= {f"{path.name}/{part}": value for part, value in parts.items()}
        elif path.suffix == ".parquet":
            found[path.name] = pq.read_table(path)
        elif path.name == "export.json":
            found[path.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _count_different(found: Mapping[str, Any], expected: Mapping[str, Any]) -> int:
    return sum(not _equals(found.get(name), expected.get(name)) for name in {*found, *expected})


def _equals(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    if isinstance(one, pa.Table):
        return bool(one.combine_chunks().equals(other.combine_chunks()))
    if isinstance(one, dict):
        return bool(one == other)
    return bool(one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes())


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)


# ---- bytes


def _measure_bytes(folder: Path, trial: bool) -> Row:
    """The second window has all items, those after it 1 % of them each."""
    random, items = np.random.default_rng(1), 5000 if trial else 100_000
    few = int(items * _SHARE)
    users = [random.integers(0, items // 50, 2 * items)]
    seen = [np.concatenate([random.permutation(items), random.permutation(items)])]
    times = [np.concatenate([np.full(items, 0), np.full(items, _DAY)])]
    for day in range(2, 6):  # other users: whoever is new reads no older items
        users.append(items * day + random.integers(0, max(1, few // 20), 2 * few))
        seen.append(np.tile(random.choice(items, few, replace=False), 2))
        times.append(np.full(2 * few, day * _DAY))
    when = np.concatenate(times) + random.integers(0, _DAY, sum(map(len, times)))
    _write(folder / "events.parquet", np.concatenate(users), np.concatenate(seen), when)
    _train(
        folder, 1, None, rows=f"item=dynamic:{2 * items}", width=64, global_batch=64, max_length=50,
        full_every=20,
    )  # fmt: skip
    files = DeltaFolder(folder / "run" / "deltas")
    full = files.read(0, full=True)
    rows = len(load_file(full.path / "table.item.safetensors")["ids"])
    sizes = []
    for number in files.list_numbers()[1]:
        delta = files.read(number)
        changed = len(load_file(delta.path / "table.item.safetensors")["ids"])
        sizes.append((changed / rows, delta.nbytes))
    share, nbytes = min(sizes, key=lambda pair: abs(pair[0] - _SHARE))
    return {
        "measured": "bytes", "width": 64, "rows": rows, "full_bytes": full.nbytes,
        "changed": share, "delta_bytes": nbytes,
        "all": [{"changed": part, "delta_bytes": size} for part, size in sizes],
    }  # fmt: skip
