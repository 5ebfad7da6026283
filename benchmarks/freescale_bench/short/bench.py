"""What a step costs, and what it is worth, where histories have a few events.

Unless one is named, the file is generated, with the sizes of Amazon Beauty's: 40,226 users, 54,542
items, 5.6 training positions a sample. Arms take turns, a seed each time; a run trains on 2 ranks
and is then evaluated on the validation part, by the code that trained it. Beside the time of a step
stands the processor time of a rank with its workers, on which other work of the machine has less of
an effect; both from marks between steps. HR@10 of the two arms on generated histories says little:
their popular items alone have 0.26.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from freescale.data.histories import HistoriesFile
from freescale.data.prepare import prepare
from freescale.train.launch import launch
from freescale_bench.common.repository import package_path, require_repository
from freescale_bench.common.results import Destination, Row, claim, write

BEFORE = "381639f"  # negatives of each sample are all that there is
GENERATED = {"users": 40_226, "items": 54_542, "median": 7.0, "sigma": 0.65, "cap": 300, "seed": 1}
BEFORE_ARM, NOW = "before", "now"
_WARM_UP = 20  # steps that are not counted
_RANKS = 2


def bench_short(given: Path | None, steps: int, seeds: int, to: Destination) -> None:
    """`given`: interactions; None generates some."""
    root = require_repository()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        now = package_path()
        data, file = _find_histories(given, folder, now)
        before = folder / "before"
        before.mkdir()
        archive = subprocess.run(
            ["git", "archive", BEFORE, "src"], cwd=root, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "x", "-C", str(before)], input=archive.stdout, check=True)
        arms = {BEFORE_ARM: str(before / "src"), NOW: now}
        for seed in range(seeds):
            for arm, path in arms.items():
                found = _measure(path, data, folder / f"{arm}-{seed}", steps, seed)
                rows.append({"arm": arm, "seed": seed, **found})
                print(rows[-1], flush=True)
    claims = []
    for key, text, goal in (
        ("step_ms", "step, times faster than before", 5.0),
        ("cpu_ms", "processor time of a step, times less than before", 5.0),
        ("hr@10", "HR@10 (validation) over that before", 1.0),
    ):
        earlier, today = (_average(rows, arm, key) for arm in (BEFORE_ARM, NOW))
        ratio = today / earlier if key == "hr@10" else earlier / today
        claims.append(claim(text, goal, ratio, "x", at_least=True))
    training = {"settings": "defaults, 2 ranks", "steps": steps, "before": BEFORE, "file": file}
    named = "" if given is None else f" --data {given.name}"
    command = f"freescale bench short{named} --steps {steps} --seeds {seeds}"
    write("short", "cpu", command, rows, claims, to=to, training=training)


def _find_histories(given: Path | None, folder: Path, package: str) -> tuple[Path, dict[str, Any]]:
    """The histories file, and what the results say about it."""
    if given is None:
        data = folder / "short.parquet"
        options = [word for key, value in GENERATED.items() for word in (f"--{key}", str(value))]
        _run(package, ["generate", str(data), *options])
        return data, dict(GENERATED)
    data = prepare(given, folder)
    about = HistoriesFile(data)
    digest = hashlib.sha256(given.read_bytes()).hexdigest()
    sizes = {"users": about.num_samples, "items": about.num_items}
    return data, {"name": given.name, "sha256": digest, **sizes}


def _average(rows: list[Row], arm: str, key: str) -> float:
    return float(statistics.mean(row[key] for row in rows if row["arm"] == arm))


def _measure(path: str, data: Path, run: Path, steps: int, seed: int) -> dict[str, float]:
    """Trains and evaluates with the package at `path`: median step, processor time, metrics."""
    settings: dict[str, object] = {
        "data": str(data),
        "cache": str(data.parent),
        "device": "cpu",
    }
    settings |= {"steps": steps, "seed": seed, "log_every": 100, "checkpoint_every": steps}
    figures = [run.with_name(f"{run.name}-{rank}.json") for rank in range(_RANKS)]
    given: dict[str, object] = {"settings": settings, "folder": str(run), "warm_up": _WARM_UP}
    given["figures"] = [str(each) for each in figures]
    searched = os.pathsep.join([path, str(Path(__file__).parent)])
    status = launch(
        [json.dumps(given)],
        _RANKS,
        module="measured_rank",
        extra=lambda rank: {"PYTHONPATH": searched},
    )
    if status:
        raise SystemExit(f"training with {path} ended with status {status}")
    found: list[dict[str, float]] = [json.loads(each.read_text()) for each in figures]
    records = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    tokens = statistics.mean(sum(record["before"]["tokens"]) for record in records[_WARM_UP:])
    cpu = statistics.mean(each["cpu_ms"] for each in found)
    return found[0] | {"cpu_ms": cpu, "tokens": tokens}


def _run(path: str, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-m", "freescale", *words],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
