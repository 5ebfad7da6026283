"""The demonstration: generated histories with structure that a model can learn, settings that train
on them in a minute, and the ladder's short form: serial against all techniques on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DEMO_SETTINGS: dict[str, Any] = {
    "global_batch": 64,
    "epochs": 6,
    "max_length": 100,
    "width": 32,
    "negatives": 64,
    "dropout": 0.0,
    "lr": 1e-2,
    "row_lr": 1e-2,
    "log_every": 40,
    "device": "cpu",  # two processes on any machine, also one with a single GPU
    "eval_batch": 512,
    # The rule would replicate so small a table; sharded, the ledger has all kinds of traffic to
    # show.
    "placement": "item=sharded",
}

# Long histories of very uneven length over a large catalogue: what the techniques are for, small
# enough for a laptop.
SHORT_SETTINGS: dict[str, Any] = {
    "global_batch": 32,
    "steps": 40,
    "max_length": 400,
    "split": "none",
    "shuffle": False,
    "width": 64,
    "layers": 1,
    "negatives": 16,
    "dropout": 0.0,
    "row_optimizer": "rowwise_adagrad",
    "row_lr": 1e-2,
    "device": "cpu",
    "placement": "item=sharded",
    "checkpoint_every": 1000,
}
SHORT_ARMS: dict[str, dict[str, str]] = {
    "serial": {"schedule": "serial", "balance": "none", "transport": "collective"},
    "staged + balancing + hostwire": {
        "schedule": "staged",
        "balance": "greedy",
        "transport": "hostwire-gloo",
    },
}
_FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("samples/s", lambda ledger: f"{ledger['samples_per_second']:,.0f}"),
    ("step, median", lambda ledger: f"{ledger['step_ms']['median']:.0f} ms"),
    ("waiting for the slower rank", lambda ledger: f"{ledger['straggler_percent']:.1f} %"),
    ("exposed communication", lambda ledger: f"{ledger['exposed_percent']:.1f} %"),
)


def make_demo_data(path: Path) -> Path:
    """Generates 4,000 histories of log-normal length over 1,000 items, unless `path` exists. The
    next item depends on the last one."""
    from freescale.data.synthetic import generate

    if not path.exists():
        generate(
            path,
            users=4000,
            items=1000,
            median=30,
            sigma=0.8,
            cap=400,
            popularity=0.5,
            global_batch=64,
            seed=1,
        )
    return path


def make_short_data(path: Path) -> Path:
    """Generates 1,280 histories over 200,000 items with 12 % collisions, unless `path` exists."""
    from freescale.data.synthetic import generate

    if not path.exists():
        sizes = {
            "users": 32 * SHORT_SETTINGS["steps"],
            "items": 200_000,
            "median": 60,
            "sigma": 1.2,
            "cap": 400,
        }
        generate(path, **sizes, collision=0.12, global_batch=32, ranks=2, seed=2)
    return path


def compare_schedules(
    data: Path, folder: Path, ranks: int, as_arguments: Callable[[dict[str, Any]], Sequence[str]]
) -> int:
    """Trains the same steps serially and with all techniques, one after the other, then prints a
    table and writes a page that compares the two runs. Returns the exit status."""
    from rich.console import Console
    from rich.table import Table

    from freescale.report.page import render_page
    from freescale.report.runs import read_runs

    console = Console()
    runs = {name: folder / f"short-{settings['schedule']}" for name, settings in SHORT_ARMS.items()}
    for name, settings in SHORT_ARMS.items():
        console.print(f"{name}: {SHORT_SETTINGS['steps']} steps", highlight=False)
        given = as_arguments({**SHORT_SETTINGS, **settings, "data": str(data)})
        command = [
            sys.executable,
            "-m",
            "freescale",
            "train",
            "--nproc",
            str(ranks),
            "--folder",
            str(runs[name]),
            *given,
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            return done.returncode
    ledgers = [
        json.loads((run / "ledger.json").read_text(encoding="utf-8")) for run in runs.values()
    ]
    table = Table("", *runs, title=f"the same steps twice, {ranks} ranks on this machine")
    for words, shown in _FIGURES:
        table.add_row(words, *map(shown, ledgers))
    losses = [
        json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["loss"]
        for run in runs.values()
    ]
    table.add_row("last loss", *(f"{loss:.5f}" for loss in losses))
    console.print(table)
    faster = ledgers[1]["samples_per_second"] / ledgers[0]["samples_per_second"]
    report = folder / "compare.html"
    report.write_text(render_page(read_runs(list(runs.values()))), encoding="utf-8")
    for line in (
        f"the full system made {faster:.2f} times serial's samples/s here: one run of each, over "
        "loopback, on these cores.",
        "It shows where the time of a step goes, not what a network would make of it: between "
        "ranks of one machine there is little",
        "communication to hide. Measured against TorchRec, arms in turn, with a network where "
        "root allows: freescale bench ladder",
        f"the two runs beside each other: {report.absolute()}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    return 0
