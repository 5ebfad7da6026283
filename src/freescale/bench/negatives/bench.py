"""Kinds of negatives, and what they do to full-catalogue metrics.

All runs of a file share model, optimizers, order and number of steps; only the negatives differ.
The metrics are those of the validation part after the last step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.bench.common.results import Destination, Row, write
from freescale.config import RunConfig
from freescale.data.prepare import prepare
from freescale.train.build import evaluate_part
from freescale.train.trainer import Trainer
from freescale.transport.api import Transport
from freescale.transport.connect import connect

# By name; `per` and `count` are the same for all that draw.
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "popularity": {"negatives_from": "popularity"},
    "popularity, not corrected": {"negatives_from": "popularity", "log_q": False},
    "in-batch": {"in_batch_share": 1.0},
    "in-batch, not corrected": {"in_batch_share": 1.0, "log_q": False},
    "mixed": {"in_batch_share": 0.5},
    "full softmax": {"negatives_from": "all"},
}
SETTINGS: dict[str, Any] = {
    "width": 64,
    "layers": 2,
    "heads": 1,
    "dropout": 0.2,
    "temperature": 0.05,
    "position_bias": False,
    "time_bias": False,
    "max_length": 20,
    "global_batch": 64,
    "negatives_per": "auto",
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
    data: Sequence[Path], seeds: int, steps: int, users: int, kept: Path | None, to: Destination
) -> None:
    """`kept`: folder of finished runs, which are not made again."""
    rows: list[Row] = []
    files: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        transport = connect("cpu", 600.0, "auto")
        for path in data:
            histories = Path(name) / f"{path.stem}.parquet"
            files[path.stem] = choose_users(prepare(path, Path(name)), users, histories)
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
    command = f"freescale bench negatives {given} --seeds {seeds} --steps {steps} --users {users}"
    training = {"settings": SETTINGS, "steps": steps, "seeds": seeds, "files": files}
    write("negatives", "cpu", command, rows, [], to=to, training=training)


def choose_users(histories: Path, count: int, out: Path) -> dict[str, int]:
    """Writes at most `count` users of a histories file, evenly spread over its order, with the
    items that they know numbered anew. Returns how many users and items these are."""
    table = pq.read_table(histories, columns=["user_id", "item_id", "timestamp"])
    count = min(count, len(table))
    table = table.take(np.arange(count) * len(table) // count)
    items = table["item_id"].combine_chunks()
    known, numbers = np.unique(items.flatten().to_numpy(), return_inverse=True)
    lengths = items.value_lengths().to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    renumbered = pa.ListArray.from_arrays(offsets, pa.array(numbers.astype(np.int64)))
    table = table.set_column(1, "item_id", renumbered)
    pq.write_table(table.replace_schema_metadata(None), out, row_group_size=1024)
    return {"users": count, "items": len(known), "events": len(numbers)}


def measure(
    config: RunConfig, histories: Path, folder: Path, transport: Transport
) -> dict[str, float]:
    """Trains and evaluates: median step and validation metrics."""
    trainer = Trainer(config, folder, histories=histories, transport=transport)
    times, last = [], time.perf_counter()
    for _ in trainer.iterate():
        now = time.perf_counter()
        times.append(1000 * (now - last))
        last = now
    metrics = evaluate_part(trainer.config, trainer.model, histories, "validation")["model"]
    return {
        "negatives": trainer.data.negatives,
        "step_ms": round(statistics.median(times), 2),
        **{name: round(value, 5) for name, value in metrics.items()},
    }
