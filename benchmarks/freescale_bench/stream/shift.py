"""A stream whose preferences change at once: what follows an item is another one from then on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from freescale.config import RunConfig
from freescale.train.build import evaluate_part
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport
from freescale_bench.common.results import (
    Destination,
    Row,
    at_most,
    show_claims,
    write,
)
from freescale_bench.stream.events import START, WINDOW, write_file

_ITEMS, _USERS, _EVENTS = 60, 150, 3000  # events of a window
_OFTEN = 0.85  # share of events that follow the rule
_METRIC = "hr@5"
_BEFORE = 4  # windows before the change, whose mean is to be reached again
_RECOVERED, _WITHIN, _NEVER = 0.95, 3, 0.5  # shares of the mean before; windows


def bench_shift(seed: int, trial: bool, to: Destination) -> None:
    windows, at, events = (6, 3, 400) if trial else (24, 14, _EVENTS)
    with tempfile.TemporaryDirectory(prefix="stream-") as folder:
        rows = _run(windows, at, events, seed, Path(folder))
    updated, frozen = ([r["updated"] for r in rows], [r.get("frozen") for r in rows])
    before = float(np.mean(updated[at - 1 - _BEFORE : at - 1]))
    after, kept = updated[at - 1 :], [value for value in frozen if value is not None]
    reached = [n for n, value in enumerate(after, 1) if value >= _RECOVERED * before]
    claims = [
        at_most(
            f"windows after the change until {_METRIC} is at least {_RECOVERED:.0%} of before",
            _WITHIN, float(reached[0] if reached else len(after) + 1), "windows",
        ),
        at_most(
            f"{_METRIC} of a model that is not updated, {_WITHIN} and more windows after the "
            "change, of before",
            100 * _NEVER, 100 * float(np.mean(kept[_WITHIN - 1 :])) / before, "%",
        ),
    ]  # fmt: skip
    if trial:
        show_claims(claims)
        return
    write("stream-shift", "cpu", f"freescale bench stream shift --seed {seed}", rows, claims, to=to)


def make_events(windows: int, at: int, each: int, seed: int) -> list[pa.Table]:
    """Tables of events, one for each window: users walk from an item to the one that follows it,
    and to a random one now and then. What follows changes in window `at`."""
    random = np.random.default_rng(seed)
    rules = [random.permutation(_ITEMS), random.permutation(_ITEMS)]
    place, found = random.integers(0, _ITEMS, _USERS), []
    for window in range(windows):
        users, items = random.integers(0, _USERS, each), np.empty(each, np.int64)
        keeps = random.random(each) < _OFTEN
        for event, user in enumerate(users.tolist()):
            step = rules[window >= at][place[user]] if keeps[event] else random.integers(_ITEMS)
            items[event] = place[user] = step
        times = START + window * WINDOW + np.sort(random.integers(0, WINDOW, each))
        found.append(pa.table({"user_id": users, "item_id": items, "timestamp": times}))
    return found


def _run(windows: int, at: int, each: int, seed: int, folder: Path) -> list[Row]:
    torch.set_num_threads(1)
    (folder / "in").mkdir()
    for number, table in enumerate(make_events(windows + 1, at, each, seed)):
        write_file(folder / "in", number, table)
    updated = Trainer(_configure(folder, windows), folder / "run", transport=LocalTransport())
    updated.train()
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    rows: list[Row] = [
        {
            "window": line["window"]["number"],
            "shifted": line["window"]["number"] >= at,
            "updated": line["validation"]["model"][_METRIC],
        }
        for line in lines
        if "validation" in line
    ]
    config = _configure(folder, at)
    frozen = Trainer(config, folder / "frozen", transport=LocalTransport())
    frozen.train()
    path, first = folder / "run" / "stream" / "first" / "histories.parquet", START // WINDOW
    for row in rows[at - 1 :]:
        window = first + row["window"]
        found = evaluate_part(config, frozen.model, path, "validation", window=window)
        row["frozen"] = found["model"][_METRIC]
    return rows


def _configure(folder: Path, windows: int) -> RunConfig:
    return RunConfig.from_settings(
        {
            "follow": str(folder / "in"), "cache": str(folder / "cache"), "windows": windows,
            "rows": "item=dynamic:4096", "window": "1h", "max_length": 50, "width": 32,
            "layers": 1, "heads": 1, "global_batch": 8, "negatives": 256, "device": "cpu",
            "dropout": 0.0, "lr": 3e-3, "row_lr": 1e-2, "trace_steps": 0, "profile_steps": 0,
            "log_every": 1000,
        }
    )  # fmt: skip
