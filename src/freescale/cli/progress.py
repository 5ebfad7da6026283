"""A progress bar for long work on files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
