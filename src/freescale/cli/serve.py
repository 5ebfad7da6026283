"""The command serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import GroupedCommand
from freescale.cli.options import PATH, add_settings, select_given
from freescale.config import ServeConfig


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
    with open_socket(config) as listener:
        run(folder, config, listener, click.echo)
