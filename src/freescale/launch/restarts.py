"""Starts the ranks of this machine again after a failure: each attempt goes on from the last
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
    arguments: Sequence[str],
    ranks: int,
    port: int | None,
    restarts: int,
    folder: Path,
    resume: str | None,
    end_snapshots: Callable[[], object],
) -> int:
    """Runs `freescale ARGUMENTS` as local ranks, and again after a failure.

    A run that a signal stopped is not started again, and neither is one that fails in the same way
    twice at the same step, or whose first attempt is refused. Snapshots of a run that is not
    started again go with it.

    Args:
        arguments: of the command, without --resume.
        ranks: how many to start.
        port: where they meet; None finds a free one for each attempt.
        restarts: at most; with 0 nothing is started again.
        folder: of the run.
        resume: of the first attempt.
        end_snapshots: drops the snapshots in this machine's memory.

    Returns:
        The exit status, as of `launch`.
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
                if resume != AUTO:  # else whoever said so starts it again
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
    """Leaves word of a rank that could not do so itself."""
    assert ended.failed is not None
    rank, status = ended.failed
    if status < 0:
        # a crash of the program is one by its own name: the same again is no chance
        crash = -status not in (signal.SIGKILL, signal.SIGTERM)
        known = -status in set(signal.Signals)  # most real-time signals have no name
        name = signal.Signals(-status).name if known else f"SIG{-status}"
        words = f"rank {rank} was killed by signal {-status}"
        note_end(folder, "launcher", Ending(name if crash else KILLED, words, 0, ended.when))


def _refuse_restart(folder: Path, before: Ended | None, ended: Ended, begun: bool) -> str:
    """Why another attempt would be no use; empty if it may be.

    Args:
        folder: of the run.
        before: the attempt before this one.
        ended: this one.
        begun: whether it got as far as the run's folder.
    """
    assert ended.failed is not None
    rank, status = ended.failed
    if begun:
        failure = find_repeated(folder)
        return explain_repeated(failure) if failure else ""
    if status < 0:
        return ""
    if before is None:
        return "the ranks were refused before the run began"
    words = ended.last_words.get(rank, "")
    if before.failed is not None and words == before.last_words.get(before.failed[0], ""):
        return "the ranks ended twice before the run went on, with the same words"
    return ""
