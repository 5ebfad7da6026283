"""Kinds of negatives, and what they do to full-catalogue metrics.

All runs of a file share model, optimizers, order and number of steps; only the negatives differ.
The metrics are those of the validation part after the last step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.config import RunConfig
from freescale.data.prepare import prepare
from freescale.train.build import evaluate_part
from freescale.train.trainer import Trainer
from freescale.transport.api import Transport
from freescale.transport.connect import connect
from freescale_bench.common.results import Destination, Row, write

LEAST_EVENTS = 5  # of a user, of the chosen items
# By name, with what differs from the settings.
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "popularity": {"negatives_from": "popularity"},
    "popularity, not corrected": {"negatives_from": "popularity", "log_q": False},
    "in-batch": {"in_batch_share": 1.0},
    "in-batch, not corrected": {"in_batch_share": 1.0, "log_q": False},
    "mixed": {"in_batch_share": 0.5},
    "full softmax": {"negatives_from": "all", "negatives": None},
}
SETTINGS: dict[str, Any] = {
    "width": 32,
    "layers": 2,
    "heads": 1,
    "dropout": 0.2,
    "temperature": 0.05,
    "position_bias": False,
    "time_bias": False,
    "max_length": 20,
    "global_batch": 64,
    "negatives": 256,
    "negatives_per": "batch",
    "lr": 1e-3,
    "row_optimizer": "adam",
    "row_lr": 1e-2,
    "warmup": 0,
    "decay": "constant",
    "precision": "fp32",
    "schedule": "serial",
    "device": "cpu",
    "workers": 0,
    "epochs": 1000,  # the steps end a run
}


def bench_negatives(
    data: Sequence[Path], seeds: int, steps: int, items: int, kept: Path | None, to: Destination
) -> None:
    """`kept`: folder of finished runs, which are not made again."""
    rows: list[Row] = []
    files: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        transport = connect("cpu", 600.0, "auto")
        for path in data:
            histories = Path(name) / f"{path.stem}.parquet"
            files[path.stem] = choose_items(prepare(path, Path(name)), items, histories)
            for seed in range(seeds):
                for kind, options in KINDS.items():
                    folder = Path(name) / f"{path.stem}-{len(rows)}"
                    settings = {**SETTINGS, **options, "steps": steps, "seed": seed}
                    config = RunConfig.from_settings({"data": str(histories), **settings})
                    done = kept / f"{path.stem}-{kind}-{seed}.json" if kept else None
                    if done is not None and done.exists():
                        found = json.loads(done.read_text())
                    else:
                        found = measure(config, histories, folder, transport)
                    if done is not None:
                        done.parent.mkdir(parents=True, exist_ok=True)
                        done.write_text(json.dumps(found))
                    rows.append({"data": path.stem, "kind": kind, "seed": seed, **found})
                    print(rows[-1], flush=True)
        transport.close()
    given = " ".join(f"--data {path.name}" for path in data)
    command = f"freescale bench negatives {given} --seeds {seeds} --steps {steps} --items {items}"
    training = {"settings": SETTINGS, "steps": steps, "seeds": seeds, "files": files}
    write("negatives", "cpu", command, rows, [], to=to, training=training)


def choose_items(histories: Path, count: int, out: Path) -> dict[str, int]:
    """Writes the events of the `count` most frequent items of a histories file, numbered anew, of
    users with at least five of them. Returns how many users, items and events these are."""
    table = pq.read_table(histories, columns=["user_id", "item_id", "timestamp"])
    lists = table["item_id"].combine_chunks()
    items, times = (
        table[name].combine_chunks().flatten().to_numpy() for name in ("item_id", "timestamp")
    )
    users = np.repeat(np.arange(len(table)), lists.value_lengths().to_numpy())
    known, numbers, counts = np.unique(items, return_inverse=True, return_counts=True)
    rank = np.empty(len(known), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(known))
    frequent = rank[numbers] < count
    enough = np.bincount(users[frequent], minlength=len(table)) >= LEAST_EVENTS
    kept = frequent & enough[users]
    lengths = np.bincount(users[kept], minlength=len(table))[enough]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = {
        name: pa.ListArray.from_arrays(offsets, pa.array(values[kept].astype(np.int64)))
        for name, values in (("item_id", rank[numbers]), ("timestamp", times))
    }
    chosen = pa.table({"user_id": table["user_id"].combine_chunks().filter(enough), **columns})
    pq.write_table(chosen, out, row_group_size=1024)
    return {"users": len(lengths), "items": min(count, len(known)), "events": int(kept.sum())}


def measure(
    config: RunConfig, histories: Path, folder: Path, transport: Transport
) -> dict[str, float]:
    """Trains and evaluates: the metrics of the validation part."""
    trainer = Trainer(config, folder, histories=histories, transport=transport)
    for _ in trainer.iterate():
        pass
    metrics = evaluate_part(trainer.config, trainer.model, histories, "validation")["model"]
    return {
        "negatives": trainer.data.negatives,
        **{name: round(value, 5) for name, value in metrics.items()},
    }
