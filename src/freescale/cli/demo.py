"""The command demo: trains on generated histories that a model can learn from in a minute, then
compares the serial schedule with all techniques on this machine."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from freescale.cli.demo_stream import stream
from freescale.cli.errors import exit_cleanly
from freescale.cli.options import PATH, format_arguments
from freescale.cli.train import train_run
from freescale.worker_server import may_have_gpu

# fmt: off
DEMO_SETTINGS: dict[str, Any] = {
    "global_batch": 64, "epochs": 6, "max_length": 100, "width": 32, "negatives": 64,
    "dropout": 0.0, "lr": 1e-2, "row_lr": 1e-2, "log_every": 40, "eval_batch": 512,
    # The rule would replicate so small a table; sharded, the ledger shows all kinds of traffic.
    "placement": "item=sharded",
}
# Long histories of very uneven length over a large catalogue: the techniques' use case, small
# enough for a laptop.
SHORT_SETTINGS: dict[str, Any] = {
    "global_batch": 32, "steps": 40, "max_length": 400, "split": "none", "shuffle": False,
    "width": 64, "layers": 1, "negatives": 16, "dropout": 0.0, "row_optimizer": "rowwise_adagrad",
    "row_lr": 1e-2, "device": "cpu", "placement": "item=sharded", "checkpoint_every": 1000,
}
SHORT_ARMS: dict[str, dict[str, str]] = {
    "serial": {"schedule": "serial", "balance": "none", "transport": "collective"},
    "staged + balancing + hostwire": {
        "schedule": "staged", "balance": "greedy", "transport": "hostwire-tcp",
    },
}
# What both kinds of histories are generated with, in addition to their longest length.
DEMO_DATA: dict[str, Any] = {
    "users": 4000, "items": 1000, "median": 30, "sigma": 0.8, "popularity": 0.5,
    "global_batch": 64, "seed": 1,
}
SHORT_DATA: dict[str, Any] = {
    "users": 1280, "items": 200_000, "median": 60, "sigma": 1.2, "collision": 0.12,
    "global_batch": 32, "ranks": 2, "seed": 2,
}
# fmt: on
COMPARISON = "compare.html"  # in the folder of the run
_LEAST_GAIN = 1.03  # times serial's samples/s: single runs of the same steps differ by as much
_FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("samples/s", lambda ledger: f"{ledger['samples_per_second']:,.0f}"),
    ("step, median", lambda ledger: f"{ledger['step_ms']['median']:.0f} ms"),
    ("waiting for the slower rank", lambda ledger: f"{ledger['straggler_percent']:.1f} %"),
    ("exposed communication", lambda ledger: f"{ledger['exposed_percent']:.1f} %"),
)


@click.group(invoke_without_command=True)
@click.option("--nproc", type=click.IntRange(1), default=2, show_default=True, help="ranks")
@click.option(
    "--folder", "run_folder", type=PATH, help="folder of the run  [default: runs/demo-DATE-TIME]"
)
@click.pass_context
def demo(context: click.Context, nproc: int, run_folder: Path | None) -> None:
    """Train a small model on generated data (about two minutes). `demo stream`: on events that keep
    coming, and serve it meanwhile.

    Uses GPUs if there are any. Then trains the same steps twice on CPU ranks, with the serial
    schedule and with every technique, and compares the two.
    """
    if context.invoked_subcommand is None:
        exit_cleanly(run_demo)(nproc, run_folder)


demo.add_command(stream)


def run_demo(nproc: int, run_folder: Path | None) -> int:
    """Trains, compares, and prints the results. Returns the exit status."""
    from freescale.train.run_folder import new_folder

    name = datetime.now().strftime("demo-%Y-%m-%d-%H%M%S")
    folder = run_folder or new_folder(Path("runs") / name)
    path = make_data(Path("runs") / "demo-data.parquet", DEMO_DATA)
    ranks, device = choose_demo_ranks(nproc, _count_gpus())
    given = {**DEMO_SETTINGS, "data": str(path), "device": device}
    status = train_run(ranks, folder, None, None, given)
    if not status and nproc > 1:  # one rank waits for nobody: nothing to compare
        short = make_data(Path("runs") / "demo-short.parquet", SHORT_DATA)
        status = compare_schedules(short, folder, nproc)
    if not status:
        print_ending(folder)
        print_recommendations(folder)
    return status


def _count_gpus() -> int:
    if not may_have_gpu():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_demo_ranks(wanted: int, gpus: int) -> tuple[int, str]:
    """Ranks of the first part, and their device: a GPU for each if there are any."""
    return (min(wanted, gpus), "cuda") if gpus else (wanted, "cpu")


def make_data(path: Path, options: Mapping[str, Any]) -> Path:
    """Generates histories whose next item depends on the last one, unless `path` exists."""
    from freescale.data.synthetic.generate import generate

    if not path.exists():
        generate(path, cap=400, **options)
    return path


def compare_schedules(data: Path, folder: Path, ranks: int) -> int:
    """Trains the same steps serially and with all techniques, one after the other, then prints a
    table and writes a page that compares the two runs. Returns the exit status."""
    from rich.console import Console
    from rich.table import Table

    from freescale.report.page import render_page
    from freescale.report.runs import read_runs

    console = Console()
    runs = _list_runs(folder)
    for name, settings in SHORT_ARMS.items():
        steps = SHORT_SETTINGS["steps"]
        console.print(f"comparison: training {steps} steps, {name}", highlight=False)
        given = format_arguments({**SHORT_SETTINGS, **settings, "data": str(data)})
        place = ["--nproc", str(ranks), "--folder", str(runs[name])]
        command = [sys.executable, "-m", "freescale", "train", *place, *given]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            return done.returncode
    ledgers = [_read_ledger(run) for run in runs.values()]
    table = Table("", *runs, title=f"the same steps twice, {ranks} ranks on this machine")
    for words, shown in _FIGURES:
        table.add_row(words, *map(shown, ledgers))
    losses = [_read_metrics(run)[-1]["loss"] for run in runs.values()]
    table.add_row("last loss", *(f"{loss:.5f}" for loss in losses))
    console.print(table)
    page = render_page(read_runs(list(runs.values())))
    (folder / COMPARISON).write_text(page, encoding="utf-8")
    return 0


def print_ending(folder: Path) -> None:
    """Prints the results, and what to type next. `folder`: the run's, with the compared runs."""
    from rich.console import Console

    console = Console()
    console.print("", _describe_results(folder), "", sep="\n", highlight=False)
    for line in _list_next_commands(folder):  # commands and paths stay in one line
        console.print(line, highlight=False, soft_wrap=True)


def print_recommendations(folder: Path) -> None:
    """Prints ten recommendations for the first user of a run's data."""
    from rich.console import Console
    from rich.table import Table

    from freescale.recommend.recommender import load

    recommender = load(folder)
    people = recommender.known_users
    (user,) = people.name([0])
    found = recommender.recommend(users=[user], exclude_seen=True)
    events = people.read([0])[0].items
    last = ", ".join(map(str, recommender.items.restore(events[-5:])))
    table = Table("place", "item", "score", title=f"ten items for user {user}, last seen: {last}")
    for place, (item, score) in enumerate(zip(found.items[0], found.scores[0]), 1):
        table.add_row(str(place), str(item), f"{score:.3f}")
    Console().print(table)


def _describe_results(folder: Path) -> str:
    """Explains the results to a first-time user."""
    test = next(entry["test"] for entry in _read_metrics(folder) if "test" in entry)
    hits, popular = (100 * test[who]["hr@10"] for who in ("model", "popularity"))
    words = (
        f"What you have seen: {_describe_ranks(folder)} trained a recommender on "
        f"generated histories. For {hits:.0f} % of the users, the item that came next is among the "
        "model's first ten; recommending the most popular items to everybody reaches "
        f"{popular:.0f} %."
    )
    if not (folder / COMPARISON).exists():
        return words
    runs = list(_list_runs(folder).values())
    serial, full = map(_read_ledger, runs)
    faster = full["samples_per_second"] / serial["samples_per_second"]
    gain = "" if faster >= _LEAST_GAIN else ": it gains nothing on this machine"
    return (
        f"{words} Then {_describe_ranks(runs[1])} trained the same steps twice. Serial does one "
        "thing after the other; the full system fetches embedding rows while it computes, divides "
        "the work evenly and keeps communication out of the way of compute. Both reach the same "
        f"loss, and the full system made {faster:.2f} times serial's samples/s{gain}. This is one "
        "run of each on one machine; docs/benchmarks.md has networks and GPUs."
    )


def _describe_ranks(run: Path) -> str:
    ranks = _read_ledger(run)["ranks"]
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    kind = "GPU" if config["train"]["device"] == "cuda" else "CPU"
    return f"{ranks} {kind} processes (ranks)" if ranks > 1 else f"one {kind} process (rank)"


def _list_next_commands(folder: Path) -> list[str]:
    program = _name_program()
    run = shlex.quote(str(folder))
    commands = {
        f"{program} report {run}": "a page that shows where the time went",
        f"{program} recommend {run} --out recs.csv": "ten items for every user",
        f"{program} inspect FILE": "what a file of your interactions holds",
        f"{program} train --data FILE --nproc 2": "trains on it",
    }
    widest = max(map(len, commands))
    lines = ["Next, type one of these:"]
    lines += [f"  {command.ljust(widest)}   # {words}" for command, words in commands.items()]
    if (folder / COMPARISON).exists():
        lines.append(f"The two runs side by side: {(folder / COMPARISON).absolute()}")
    return lines


def _name_program() -> str:
    """The command `freescale`, or its path if the environment is not activated."""
    if shutil.which("freescale"):
        return "freescale"
    program = Path(sys.executable).with_name("freescale")
    if not program.exists():
        return f"{sys.executable} -m freescale"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


def _list_runs(folder: Path) -> dict[str, Path]:
    return {name: folder / f"short-{arm['schedule']}" for name, arm in SHORT_ARMS.items()}


def _read_ledger(run: Path) -> Any:
    return json.loads((run / "ledger.json").read_text(encoding="utf-8"))


def _read_metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
