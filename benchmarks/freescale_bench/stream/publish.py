"""What publishing adds to a step: steps without checkpoints, with them, and with deltas of them.
All arms take turns; each turn has a checkpoint in its middle, and ends before what it has begun is
waited for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from freescale.config import RunConfig
from freescale.train.trainer import Trainer
from freescale_bench.common.ranks import get_gpu_name, open_rank
from freescale_bench.common.results import Destination, Row, at_most, show_claims, spread, write
from freescale_bench.common.turns import wait_idle

_ARMS = ("none", "checkpoints", "deltas")
_MOST = 1.0  # % of a step


def bench_publish(device: str, turns: int, every: int, trial: bool, to: Destination) -> None:
    """As one of the ranks."""
    with open_rank(device, 600) as (transport, folder):
        if transport.rank == 0:
            _write_events(folder / "events.parquet", 2000 if device == "cpu" else 20_000)
        transport.gather_bytes(b"")
        since = time.perf_counter()

        def show(words: str) -> None:
            if transport.rank == 0:
                print(f"{time.perf_counter() - since:.0f} s: {words}", flush=True)

        arms: dict[str, Trainer] = {}
        for arm in _ARMS:
            arms[arm] = _build(arm, folder, transport, device, every)
            show(f"built {arm}")
        steps = {name: trainer.iterate() for name, trainer in arms.items()}
        found: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(turns + 1):
            first = turn % len(arms)
            for name in [*_ARMS[first:], *_ARMS[:first]]:
                begin = time.perf_counter()
                for _ in range(every):
                    next(steps[name])
                wait_idle(transport.device)
                if turn:  # the first one compiles
                    found[name].append(1000 * (time.perf_counter() - begin) / every)
                arms[name].checkpoints.wait()
                arms[name].checkpoints.wait_published()
                transport.gather_bytes(b"")
                show(f"turn {turn} of {turns}, {name}")
        del steps
        if transport.rank == 0:
            published = len(list((folder / "deltas" / "deltas").iterdir()))
            _report(found, published, transport.world, device, turns, every, trial, to)


def _report(
    found: dict[str, list[float]], published: int, ranks: int, device: str, turns: int, every: int,
    trial: bool, to: Destination,
) -> None:  # fmt: skip
    rows: list[Row] = [{"arm": name, "step_ms": spread(times)} for name, times in found.items()]
    pairs = zip(found["deltas"], found["checkpoints"], strict=True)
    # of neighbouring turns: the machine's own changes are in both
    added = spread([100 * (one / other - 1) for one, other in pairs])
    rows.append({"arm": "deltas against checkpoints", "percent": added, "published": published})
    text = f"publishing every {every} steps adds to a step, {ranks} ranks"
    claims = [at_most(text, _MOST, added["median"], "%")]
    if trial:
        show_claims(claims)
        return
    words = f"--device {device} --nproc {ranks} --turns {turns} --every {every}"
    testbed = f"{ranks}ranks-{get_gpu_name() if device == 'cuda' else 'cpu'}"
    write("stream-publish", testbed, f"freescale bench stream publish {words}", rows, claims, to=to)


def _write_events(path: Path, users: int) -> None:
    random, events = np.random.default_rng(0), users * 100
    columns = {
        "user_id": random.integers(0, users, events),
        "item_id": (users * 50 * random.random(events) ** 2).astype(np.int64),
        "timestamp": 1_700_000_000 + np.arange(events),
    }
    pq.write_table(pa.table(columns), path)


def _build(arm: str, folder: Path, transport: Any, device: str, every: int) -> Trainer:
    wide = device == "cuda"
    settings: dict[str, Any] = {
        "data": str(folder / "events.parquet"), "cache": str(folder / "cache"), "epochs": 1000,
        "rows": f"item=dynamic:{4_000_000 if wide else 200_000}", "placement": "sharded",
        "width": 128 if wide else 32, "layers": 4 if wide else 2, "split": "none",
        "global_batch": 1024 if wide else 64, "max_length": 100, "device": device,
        "checkpoint_every": 1_000_000 if arm == "none" else every, "full_every": 50,
        "async_checkpoints": True, "deltas": 1_000_000 if arm == "deltas" else None,
        "keep_deltas": 1000, "trace_steps": 0, "profile_steps": 0, "log_every": 1_000_000,
        "row_optimizer": "rowwise_adagrad",
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    trainer = Trainer(RunConfig.from_settings(given), folder / arm, transport=transport)
    torch.manual_seed(0)
    return trainer
