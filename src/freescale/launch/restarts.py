"""Restarts the ranks of this machine after a failure; each attempt continues from the last
checkpoint. Across machines torchrun does the same, with `--max-restarts` and `--resume auto`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from freescale.launch.attempts import (
    AUTO,
    KILLED,
    Ending,
    explain_repeated,
    find_begin,
    find_repeated,
    note_end,
)
from freescale.launch.rank_server import open_rank_server
from freescale.launch.ranks import Ended, report_end, run_ranks


def launch_with_restarts(
    arguments: Sequence[str],  # without --resume
    ranks: int,
    port: int | None,  # port of the rendezvous; None finds a free one for each attempt
    restarts: int,
    folder: Path,  # folder of the run
    resume: str | None,  # --resume of the first attempt
    end_snapshots: Callable[[], object],  # drops the snapshots in this machine's memory
) -> int:
    """Runs `freescale ARGUMENTS` as local ranks, and again after a failure; returns the exit
    status, as of `launch`.

    There is no restart after a stop by a signal, after two equal failures at the same step, or if
    the first attempt is refused. Without a restart, snapshots of the run are dropped.
    """
    with open_rank_server(restarts) as server:
        before: Ended | None = None
        start = None if server is None else server.start_rank
        for attempt in range(restarts + 1):
            begun_before = find_begin(folder)
            how = [] if resume is None else ["--resume", resume]
            ended = run_ranks([*arguments, *how], ranks, port, start=start)
            if ended.failed is None or ended.is_stopped or ended.number:
                return report_end(ended)
            _note_death(folder, ended)
            if not restarts:
                if resume != AUTO:  # with `auto`, a scheduler restarts it
                    end_snapshots()
                return report_end(ended)
            begun = find_begin(folder) not in (None, begun_before)
            reason = _refuse_restart(folder, before, ended, begun)
            if attempt == restarts and not reason:
                reason = f"--restarts {restarts}: it was the last"
            if reason:
                print(f"freescale: not started again: {reason}", file=sys.stderr)
                end_snapshots()
                return report_end(ended)
            print(
                f"freescale: {ended.describe()}; starting all ranks again, "
                f"restart {attempt + 1} of {restarts}",
                file=sys.stderr,
                flush=True,
            )
            if server is not None:
                server.explain_absence()
            before, resume = ended, AUTO
    raise AssertionError("the last attempt returns")


def _note_death(folder: Path, ended: Ended) -> None:
    """Notes the death of a rank on its behalf."""
    assert ended.failed is not None
    rank, status = ended.failed
    if status < 0:
        # a crash is named by its signal: a repetition is a fault of the program
        crash = -status not in (signal.SIGKILL, signal.SIGTERM)
        known = -status in set(signal.Signals)  # most real-time signals have no name
        name = signal.Signals(-status).name if known else f"SIG{-status}"
        message = f"rank {rank} was killed by signal {-status}"
        note_end(folder, "launcher", Ending(name if crash else KILLED, message, 0, ended.when))


def _refuse_restart(folder: Path, before: Ended | None, ended: Ended, begun: bool) -> str:
    """Why another attempt is pointless; empty if it is not. `before`: the previous attempt;
    `begun`: whether this one reached the run's folder."""
    assert ended.failed is not None
    rank, status = ended.failed
    if begun:
        failure = find_repeated(folder)
        return explain_repeated(failure) if failure else ""
    if status < 0:
        return ""
    if before is None:
        return "the ranks were refused before the run began"
    message = ended.last_lines.get(rank, "")
    if before.failed is not None and message == before.last_lines.get(before.failed[0], ""):
        return "the ranks ended twice before the run went on, with the same message"
    return ""
