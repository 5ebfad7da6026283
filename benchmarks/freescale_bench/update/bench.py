"""The three models, and what they are ranked on."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freescale.config import RunConfig
from freescale.data import ReadSpec, SampleSpec, SplitSpec
from freescale.data.batches.loader import Histories
from freescale.train.evaluate_retrieval import evaluate_retrieval
from freescale.train.trainer import Trainer
from freescale.train.update import continue_run
from freescale.transport.local import LocalTransport
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Row, at_least, at_most, write

DAY, LENGTH = 86_400, 50
MOST = 600  # targets of a day on which nothing is trained anew
# Of an update: a night has few batches, so dense weights learn slowly, and rows faster.
RATES = {"lr": 1e-4, "row_lr": 1e-3}
METRICS = ("ndcg@10", "hr@10")
LEAST_QUALITY, MOST_COST = 0.97, 0.1  # targets: of training from scratch


@dataclass(frozen=True)
class Setting:
    """How often what is trained."""

    days: int
    every: int
    epochs: int
    update_epochs: int


class Days:
    """The events, cut into days. `folder` has a file for each day so far."""

    def __init__(self, data: Path, days: int, folder: Path) -> None:
        events = pq.read_table(data, columns=["user_id", "item_id", "timestamp"])
        self._events = events.sort_by([("timestamp", "ascending")])
        self._day = self._events.column("timestamp").to_numpy() // DAY
        self.last = np.unique(self._day)[-days:]
        self.num_items = pc.max(events.column("item_id")).as_py() + 1
        self.folder = folder
        folder.mkdir()
        self._write("base", int(np.searchsorted(self._day, self.last[0])), 0)

    def _write(self, name: str, end: int, begin: int) -> None:
        pq.write_table(self._events.slice(begin, end - begin), self.folder / f"{name}.parquet")

    def _find(self, day: int) -> tuple[int, int]:
        begin, end = (int(np.searchsorted(self._day, day, side)) for side in ("left", "right"))
        return begin, end

    def add(self, day: int) -> None:
        """The night after a day: its events arrive."""
        begin, end = self._find(day)
        self._write(f"day-{day}", end, begin)

    def write_targets(self, day: int, path: Path, most: int | None) -> int:
        """A history for each event of a day that has one before it; the event is its last. `most`:
        only so many, evenly spaced. Returns how many."""
        begin, end = self._find(day)
        users, items, times = (column.to_numpy() for column in self._events.columns)
        today = np.unique(users[begin:end])
        known = np.flatnonzero(np.isin(users[:end], today))
        rows: dict[str, list[Any]] = {"user_id": [], "item_id": [], "timestamp": []}
        for user in today.tolist():
            own = known[users[known] == user]
            for place in np.flatnonzero(own >= begin).tolist():
                if place:
                    part = own[max(0, place - LENGTH) : place + 1]
                    rows["user_id"].append(user)
                    rows["item_id"].append(items[part].tolist())
                    rows["timestamp"].append(times[part].tolist())
        table = pa.table(rows)
        if most is not None and len(table) > most:
            table = table.take(np.linspace(0, len(table) - 1, most).astype(np.int64))
        pq.write_table(table, path)
        return len(table)


def train(config: RunConfig, folder: Path) -> tuple[Trainer, Row]:
    """A trained run, and what it cost."""
    run = Trainer(config, folder, transport=LocalTransport(config.train.device))
    begin = time.perf_counter()
    run.train()
    seconds = time.perf_counter() - begin
    return run, {"seconds": seconds, "samples": config.train.epochs * run.data.num_samples}


def rank(run: Trainer, targets: Path, num_items: int) -> Row:
    """Metrics of the targets of a day."""
    data = Histories(
        targets, 256, sample=SampleSpec(max_length=LENGTH),
        split=SplitSpec("leave-one-out", part="test"), read=ReadSpec(num_items=num_items),
    )  # fmt: skip
    found = evaluate_retrieval(run.model, data)["model"]
    return {name: found[name] for name in METRICS}


def bench_update(source: Path, setting: Setting, device: str, trial: bool, to: Destination) -> None:
    if device == "cuda":
        require_gpu(device)
    if trial:
        setting = replace(setting, days=2, every=1, epochs=1, update_epochs=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        days = Days(source, setting.days, folder / "events")
        config = RunConfig.from_settings({
            "data": str(days.folder), "cache": str(folder / "cache"), "device": device,
            "num_items": days.num_items, "split": "none", "max_length": LENGTH, "width": 32,
            "layers": 1, "heads": 1, "global_batch": 64, "epochs": setting.epochs,
            "trace_steps": 0, "profile_steps": 0, "checkpoint_every": 1_000_000,
        })  # fmt: skip
        rows = follow_days(days, config, setting, folder)
    figures = summarize(rows)
    print(figures, flush=True)
    if trial:
        return
    claims = [
        at_least("NDCG@10 of nightly updates, of training anew", LEAST_QUALITY,
                 figures["updated/anew"], "times"),
        at_most("seconds of an update, of training anew", MOST_COST, figures["seconds"], "times"),
        at_most("samples of an update, of training anew", MOST_COST, figures["samples"], "times"),
    ]  # fmt: skip
    command = f"freescale bench update --data {source.name} --days {setting.days}"
    command += f" --every {setting.every} --epochs {setting.epochs}"
    command += f" --update-epochs {setting.update_epochs} --device {device}"
    testbed = get_gpu_name() if device == "cuda" else "cpu"
    write("update", testbed, command, rows, claims, [], to=to, data=source.name,
          setting=asdict(setting) | RATES, model=asdict(config.model), figures=figures)  # fmt: skip


def follow_days(days: Days, config: RunConfig, setting: Setting, folder: Path) -> list[Row]:
    """A row for each day."""
    first, cost = train(config, folder / "first")
    print({"first": cost}, flush=True)
    updated, anew, rows = first, first, []
    before = folder / "first"
    for number, day in enumerate(days.last.tolist()):
        targets = folder / "targets.parquet"
        compared = number % setting.every == 0
        count = days.write_targets(day, targets, None if compared else MOST)
        row: Row = {"day": number + 1, "targets": count}
        row["frozen"] = rank(first, targets, days.num_items)
        row["updated"] = rank(updated, targets, days.num_items)
        if compared:
            if number:
                anew, row["cost of anew"] = train(config, folder / f"anew-{number}")
            row["anew"] = rank(anew, targets, days.num_items)
        days.add(day)
        given = {"epochs": setting.update_epochs, **RATES}
        night = folder / f"night-{number}"
        updated, row["cost of update"] = train(
            continue_run(before, RunConfig.read(before), given), night
        )
        before = night
        rows.append(row)
        print(row, flush=True)
    return rows


def summarize(rows: list[Row]) -> dict[str, float]:
    """Means over targets; those against training anew are of the days on which that happens."""

    def mean(kind: str, some: list[Row], metric: str = METRICS[0]) -> float:
        total = sum(row["targets"] for row in some)
        return float(sum(row[kind][metric] * row["targets"] for row in some) / total)

    def cost(kind: str, figure: str) -> float:
        return float(np.mean([row[kind][figure] for row in rows if kind in row]))

    compared = [row for row in rows if "anew" in row]
    # the first day has no update yet: all models are the same
    later = [row for row in compared if row["day"] > 1]
    return {
        **{f"{kind}, all days": mean(kind, rows) for kind in ("updated", "frozen")},
        **{kind: mean(kind, later) for kind in ("updated", "anew", "frozen")},
        "updated/anew": mean("updated", later) / mean("anew", later),
        "targets": sum(row["targets"] for row in later),
        "seconds": cost("cost of update", "seconds") / cost("cost of anew", "seconds"),
        "samples": cost("cost of update", "samples") / cost("cost of anew", "samples"),
    }
