"""The command serve."""

from __future__ import annotations

import os
from pathlib import Path

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.evaluate import add_checkpoint
from freescale.cli.layout import GroupedCommand, grouped_option
from freescale.cli.options import PATH

_NETWORK, _LOAD, _LIMITS, _MODEL = "Network", "Load", "Limits of a request", "Model"


@click.command(cls=GroupedCommand)
@click.argument("folder", metavar="RUN|EXPORT", type=PATH)
@grouped_option(
    "--host",
    heading=_NETWORK,
    common=True,
    default="127.0.0.1",
    show_default=True,
    help="address to listen on; 0.0.0.0 for all of this machine",
)
@grouped_option(
    "--port",
    heading=_NETWORK,
    common=True,
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0: a free one, which is printed",
)
@grouped_option(
    "--token",
    heading=_NETWORK,
    common=True,
    envvar="FREESCALE_TOKEN",
    help="requests need the header `Authorization: Bearer TOKEN`; better given as the environment "
    "variable FREESCALE_TOKEN, which other users of the machine do not see",
)
@grouped_option(
    "--access-log/--no-access-log",
    heading=_NETWORK,
    default=True,
    show_default=True,
    help="a line of JSON on stderr for each request",
)
@grouped_option(
    "--batch",
    heading=_LOAD,
    common=True,
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="requests that the model answers at a time, at most",
)
@grouped_option(
    "--wait",
    heading=_LOAD,
    common=True,
    type=click.FloatRange(0),
    default=2,
    show_default=True,
    help="milliseconds that a request waits for others to share its batch",
)
@grouped_option(
    "--queue",
    heading=_LOAD,
    common=True,
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="requests that wait or are being answered; further ones get status 503 at once",
)
@grouped_option(
    "--memory",
    heading=_LOAD,
    common=True,
    default="256MB",
    show_default=True,
    help="for the events of users, as 2GB; those who were seen longest ago are dropped",
)
@grouped_option(
    "--keep-events",
    heading=_LOAD,
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="events kept of a user beyond the model's max-length, for exclude_seen",
)
@grouped_option(
    "--max-body", heading=_LIMITS, default="1MB", show_default=True, help="size of a request"
)
@grouped_option(
    "--max-k",
    heading=_LIMITS,
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="items of an answer",
)
@grouped_option(
    "--max-history",
    heading=_LIMITS,
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="events of a history",
)
@grouped_option(
    "--max-candidates",
    heading=_LIMITS,
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="items to choose from, or to score",
)
@grouped_option("--data", heading=_MODEL, help="where the run's data is, if it has moved")
@grouped_option(
    "--device",
    heading=_MODEL,
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="device of the model",
)
@grouped_option(
    "--threads",
    heading=_MODEL,
    type=click.IntRange(1),
    help="cores for the model  [default: half of them; requests are read on the others]",
)
@add_checkpoint
@exit_cleanly
def serve(
    folder: Path,
    host: str,
    port: int,
    token: str | None,
    access_log: bool,
    batch: int,
    wait: float,
    queue: int,
    memory: str,
    keep_events: int,
    max_body: str,
    max_k: int,
    max_history: int,
    max_candidates: int,
    data: str | None,
    device: str,
    threads: int | None,
    checkpoint: str | None,
) -> int:  # fmt: skip
    """Answer requests for recommendations over HTTP.

    POST /recommend and /score take a history or a user; POST /events appends to the events of a
    user, which the next request reads. /docs describes all fields, / is a page to try the model.
    /metrics is for Prometheus, /healthz for a load balancer.

    Users and their events are kept in memory: those of the run's data, and those that were posted.
    They are gone when the server ends.

    SIGTERM ends the server when all that it has accepted is answered.
    """
    try:
        from freescale.recommend.serve.server import open_socket, run, warm_up
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("freescale"):
            raise
        raise ValueError(
            f"{error.name} is missing: `pip install 'freescale[serve]'` installs what the server "
            "needs"
        ) from None
    import torch

    from freescale.embedding.host_tables.tiers import parse_bytes
    from freescale.recommend.recommender import load
    from freescale.recommend.serve.app import Server
    from freescale.recommend.serve.schema import Limits

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // 2))
    limits = Limits(
        batch=batch, wait=wait / 1000, queue=queue, memory=parse_bytes(memory), kept=keep_events,
        body=parse_bytes(max_body), requests=min(queue, Limits.requests), k=max_k,
        history=max_history, candidates=max_candidates,
    )  # fmt: skip
    with open_socket(host, port) as listener:
        recommender = load(folder, device, checkpoint=checkpoint, data=data)
        warm_up(recommender)
        server = Server(recommender, limits, token or None, access_log)

        def announce(address: str) -> None:
            click.echo(f"serving {folder} at {address}; {address}/docs has the fields")

        run(server, listener, announce)
    return 0
