"""The commands that use a model: recommend and serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.finished import add_checkpoint
from freescale.cli.layout import GroupedCommand
from freescale.cli.options import PATH, add_settings, format_arguments, select_given
from freescale.cli.runs import add_nproc, add_port, show_progress
from freescale.config import ServeConfig
from freescale.launch.ranks import follow_launcher, is_rank, launch


@click.command()
@click.argument("run_folder", metavar="RUN", type=PATH)
@click.option("--out", type=PATH, required=True, help="file to write: NAME.parquet, .csv or .jsonl")
@click.option(
    "--users",
    default="all",
    show_default=True,
    help="all users of the run's data, or a file of ids (.txt with one on a line, or a table)",
)
@click.option("--k", type=click.IntRange(1), default=10, show_default=True, help="items per user")
@click.option("--exclude-seen", is_flag=True, help="leave out the items of each user's history")
@click.option("--candidates", help="file with the ids of the items to choose from")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="FEATURE=VALUE",
    help="items with a value of a feature, as category=shoes|boots; several must all fit",
)
@click.option(
    "--before",
    type=click.Choice(("validation", "test")),
    help="histories up to the target of a part, as eval sees them  [default: whole histories]",
)
@click.option("--data", help="where the run's data is, if it has moved")
@click.option(
    "--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", show_default=True
)
@add_checkpoint
@add_nproc
@add_port
@exit_cleanly
def recommend(
    run_folder: Path,
    out: Path,
    users: str,
    k: int,
    exclude_seen: bool,
    candidates: str | None,
    filters: tuple[str, ...],
    before: str | None,
    data: str | None,
    device: str,
    checkpoint: str | None,
    nproc: int,
    port: int | None,
) -> int:
    """Write the best items for every user to a file.

    Scores all items, exactly. The file has a row per user and item, in the order of users: user,
    place, item, score. A JSON lines file has a line per user. A job that was stopped continues with
    the same command.
    """
    from freescale.recommend.job import Job

    job = Job(out, users, k, exclude_seen, candidates, filters, before)
    if nproc > 1 and not is_rank():
        given = {
            "out": out, "users": users, "k": k, "candidates": candidates, "before": before,
            "data": data, "device": device, "checkpoint": checkpoint,
        }  # fmt: skip
        more = [f"--filter={text}" for text in filters] + ["--exclude-seen"] * exclude_seen
        return launch(["recommend", str(run_folder), *format_arguments(given), *more], nproc, port)
    from freescale.config import TrainConfig
    from freescale.recommend.job import run_job
    from freescale.recommend.recommender import load
    from freescale.transport.connect import connect

    transport = connect(device, TrainConfig.timeout, TrainConfig.transport)
    with show_progress() as progress:
        recommender = load(run_folder, transport.device, checkpoint=checkpoint, data=data)
        lines = run_job(job, recommender, transport, progress or (lambda stage, share: None))
    if transport.rank == 0:
        for line in lines:
            click.echo(line)
    transport.close()
    return 0


@click.command(cls=GroupedCommand)
@click.argument("folder", metavar="RUN|EXPORT", type=PATH)
@add_settings(ServeConfig)
@exit_cleanly
def serve(folder: Path, **given: Any) -> None:
    """Answer requests for recommendations over HTTP.

    POST /recommend and /score take a history or a user; POST /events appends to the events of a
    user, which the next request reads. /docs describes all fields, / is a page to try the model.
    /metrics is for Prometheus, /healthz for a load balancer.

    Events of users are kept in memory, and are gone when the server ends. A run also knows the
    users of its data.

    SIGTERM ends the server when all that it has accepted is answered.
    """
    config = ServeConfig(
        **{"token": os.environ.get("FREESCALE_TOKEN") or None} | select_given(given)
    )
    try:
        from freescale.recommend.serve.server import open_socket, run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("freescale"):
            raise
        raise ValueError(
            f"{error.name} is missing: `pip install 'freescale[serve]'` has what a server needs"
        ) from None
    follow_launcher()
    with open_socket(config) as listener:
        run(folder, config, listener, click.echo)
