"""Progress bars for long work on files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freescale.config import RunConfig


@contextmanager
def show_progress() -> Iterator[Callable[[str, float], None] | None]:
    """Yields a function of (stage, share done), on a terminal and on rank 0; elsewhere None."""
    if not sys.stdout.isatty() or os.environ.get("RANK", "0") != "0":
        yield None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, share: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0)
            bar.update(tasks[stage], completed=share)

        yield show


def prepare_data(config: RunConfig) -> Path:
    """Returns the histories file of the data, and makes the event store of a run in order of time.
    One process of a machine makes them; the others wait."""
    from freescale.train.build import find_cache, prepare_data
    from freescale.train.time_order import prepare_windows

    with show_progress() as progress:
        path = prepare_data(config, progress)
        if config.data.order == "time":
            prepare_windows(config, path, find_cache(config), progress)
        return path
