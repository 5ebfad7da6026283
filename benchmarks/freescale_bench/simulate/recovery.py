"""Predicts the share of a cluster's time that is useful if failures interrupt training.

    | notice | process start | rendezvous | restore | first step | repeated steps | useful ... |
    ^ a failure                                                                   the next failure ^

The costs of a failure are a TOML file with the source of every number (recoveries/*.toml are
shipped); the step is simulated, with the options of `freescale simulate`.

    freescale bench simulate useful --gpus 64 --failure-every 600 --snapshot-every 20
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import add_settings, select_given
from freescale.config import SimulateConfig, TrainConfig
from freescale.simulate.inputs import (
    build_cluster,
    build_workload,
    describe_training,
    find_dynamic,
    list_settings,
    read_trained_run,
)
from freescale.simulate.network import check_number, find_file, read_toml
from freescale.simulate.recorded_workload import RecordedWorkload
from freescale.simulate.run import Plans, list_arms
from freescale.simulate.verdict import ALL, GIVEN

RECOVERIES = Path(__file__).parent / "recoveries"
USUAL = "this-machine"
MEMORY, BUDDY, DISK = "memory", "buddy", "disk"
PARTS = ("notice", "process start", "rendezvous", "restore", "first step", "repeated steps")
_WIDE = 120  # columns of the table, if the output is not a terminal


@dataclass(frozen=True)
class RecoveryCosts:
    """What a failure costs, apart from repeated steps."""

    name: str
    notice_s: float  # from the death of a rank until all ranks have ended
    # time until a restarted rank is ready for the rendezvous: fork, remaining imports, device;
    # with torchrun, the start of Python and all imports
    start_s: float
    meet_s: float  # rendezvous and connections: a constant, ...
    meet_per_rank_s: float
    meet_per_pair_s: float  # ... of ranks
    restore_s: float  # a constant
    memory_gb_per_s: float  # speed at which a rank restores and verifies its state
    disk_gb_per_s: float
    first_step_s: float  # extra time
    snapshot_percent: float  # share of a step that snapshots and the marking of rows take
    snapshot_s: float  # from the saved step until it can be restored
    checkpoint_s: float
    about: str = ""

    def __post_init__(self) -> None:
        for name in (entry.name for entry in fields(self) if entry.name not in ("name", "about")):
            what, rate = f"recovery {self.name!r}: {name}", name.endswith("gb_per_s")
            check_number(what, getattr(self, name), above=rate)


@dataclass(frozen=True)
class Training:
    """The run that failures interrupt."""

    gpus: int  # a rank each
    step_s: float  # without snapshots
    state_gb: float  # state of a rank: rows, dense weights and optimizer state
    snapshot_every: int  # steps
    checkpoint_every: int
    far_gb_per_s: float  # bandwidth of a rank's link to other machines


def list_costs(costs: RecoveryCosts, training: Training, source: str) -> dict[str, float]:
    """Seconds of each of `PARTS` for one failure, after which ranks restore from `source`. Failures
    come at any time: on average half an interval is lost, and the save in progress."""
    if source == DISK:
        rate, every, saving = costs.disk_gb_per_s, training.checkpoint_every, costs.checkpoint_s
    else:
        rate, every, saving = costs.memory_gb_per_s, training.snapshot_every, costs.snapshot_s
    restore = costs.restore_s + training.state_gb / rate
    if source == BUDDY:  # read there, then sent
        restore += training.state_gb / training.far_gb_per_s
    ranks = training.gpus
    slower = 1 + costs.snapshot_percent / 100
    values = (
        costs.notice_s,
        costs.start_s,
        costs.meet_s + (costs.meet_per_rank_s + costs.meet_per_pair_s * ranks) * ranks,
        restore,
        costs.first_step_s,
        every / 2 * training.step_s * slower + saving,
    )
    return dict(zip(PARTS, values, strict=True))


def compute_useful_time(
    costs: RecoveryCosts, training: Training, failure_every: float, source: str
) -> dict[str, Any]:
    """The share of time that advances the model, compared with a run without failures and
    snapshots, at a failure every `failure_every` seconds."""
    parts = list_costs(costs, training, source)
    kept = max(0.0, 1 - sum(parts.values()) / failure_every)
    return {
        "gpus": training.gpus,
        "from": source,
        "seconds": parts,
        "useful": kept / (1 + costs.snapshot_percent / 100),
    }


def load_recovery(name: str) -> RecoveryCosts:
    """Loads shipped costs by name, or a TOML file. ValueError if there is no such file, or it does
    not hold the costs."""
    path = find_file(RECOVERIES, name, ".toml", "costs of a recovery")
    known = {entry.name for entry in fields(RecoveryCosts)} - {"name"}
    raw = read_toml(path, known, known - {"about"}, "costs of a recovery are")
    return RecoveryCosts(path.stem, **raw)


@dataclass(frozen=True)
class Failures:
    """How often a run fails, and what it saves."""

    every: float  # seconds
    recovery: str = USUAL  # costs that are shipped, or a TOML file
    snapshot_every: int = 20  # steps
    checkpoint_every: int = TrainConfig.checkpoint_every
    state_gb: float | None = None  # None: tables, dense weights and their optimizers' state


def predict_useful_time(
    config: SimulateConfig, gpus: Sequence[int], failures: Failures
) -> list[dict[str, Any]]:
    """The share of useful time by number of GPUs and source of the restored state, with all
    techniques or those of `config.schedule`."""
    costs, rows = load_recovery(failures.recovery), list[dict[str, Any]]()
    run = read_trained_run(config.run) if config.run else None
    trained = describe_training(config, run.config if run else None)
    for count in gpus:
        cluster = build_cluster(config, count, trained)
        source = build_workload(config, count, trained)
        if isinstance(source, RecordedWorkload):
            source.shard_large_tables(cluster.model, count)
        plans = Plans(cluster, source, config.steps, find_dynamic(config))
        label = GIVEN if config.schedule is not None else ALL
        setting = dict(list_arms(config))[label]
        figures = plans.simulate(label, setting).figures
        dense = 12 * cluster.model.parameters  # a weight and both of Adam's moments
        state = plans.place(setting.placement, setting.cache_miss).count_bytes(count) + dense
        training = Training(
            count,
            figures["step_ms"]["mean"] / 1e3,
            failures.state_gb or state / 1e9,
            failures.snapshot_every,
            failures.checkpoint_every,
            cluster.network.far.gb_per_s,
        )
        several = count > cluster.network.gpus_per_node
        for place in (MEMORY, *([BUDDY] if several else []), DISK):
            rows.append(compute_useful_time(costs, training, failures.every, place))
    return rows


@click.command()
@click.option("--gpus", multiple=True, type=click.IntRange(1), default=(256,), show_default=True)
@click.option(
    "--failure-every",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="seconds between failures",
)
@click.option("--recovery", default=USUAL, show_default=True, help="costs: shipped, or a TOML file")
@click.option(
    "--snapshot-every",
    type=click.IntRange(1),
    default=Failures.snapshot_every,
    show_default=True,
    help="steps between snapshots in memory",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1),
    default=Failures.checkpoint_every,
    show_default=True,
    help="steps between checkpoints",
)
@click.option(
    "--state-gb",
    type=click.FloatRange(0, min_open=True),
    help="GB that a GPU restores (default: its tables, weights and their optimizers' state)",
)
@add_settings(SimulateConfig)
@exit_cleanly
def command(
    gpus: tuple[int, ...],
    failure_every: float,
    recovery: str,
    snapshot_every: int,
    checkpoint_every: int,
    state_gb: float | None,
    **given: Any,
) -> None:
    """Predict the useful time of a cluster under failures, and what each failure costs."""
    settings = select_given(given)
    if "run" in settings:
        settings = list_settings(read_trained_run(settings["run"])) | settings
    failures = Failures(failure_every, recovery, snapshot_every, checkpoint_every, state_gb)
    rows = predict_useful_time(SimulateConfig(**settings), gpus, failures)
    console, costs = Console(), load_recovery(recovery)
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(make_table(rows, failure_every))
    console.print(f"recovery: {costs.name} ({costs.about})", highlight=False, soft_wrap=True)


def make_table(rows: Sequence[Mapping[str, Any]], failure_every: float) -> Table:
    """The cost of each failure, and the time that remains."""
    every = f"a failure every {failure_every:,.0f} s"
    table = Table(title=f"useful time at {every}, and the seconds that each costs")
    for column in ("GPUs", "restored from", *PARTS, "together", "useful"):
        table.add_column(column, justify="left" if column == "restored from" else "right")
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{value:,.2f}" for value in (*seconds.values(), sum(seconds.values()))]
        table.add_row(f"{row['gpus']:,}", row["from"], *cells, f"{100 * row['useful']:.1f} %")
    return table
