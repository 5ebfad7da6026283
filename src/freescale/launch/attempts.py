"""The record of an attempt at a run, for the next one: that it began, and how it ended on each
rank.

`RUN/.attempt` exists while a run trains and after an attempt that did not complete it. It holds
`begun.json`, a file of each rank that failed or was stopped, and one of the launcher about ranks
that were killed. Only the next attempt reads it, and writes the restart to metrics.jsonl.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = ".attempt"
AUTO = "auto"  # --resume: continue the run in the folder if there is one, else begin
_BEGUN = "begun.json"

# Kinds of endings other than the name of an exception.
STOPPED = "stopped"  # by a signal, and saved
KILLED = "killed"  # by a signal that leaves no time
LOST = "lost"  # no record: all ranks were killed, or the machine is gone

# External causes, and consequences of another rank's failure: a repetition is no sign of a fault in
# the program.
_FROM_OUTSIDE = {STOPPED, KILLED, LOST, "TransportError", "RemoteError", "KeyboardInterrupt"}


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, on one rank or as a whole."""

    kind: str  # name of the exception, or one of the kinds above
    message: str
    step: int  # steps made by then
    time: float  # seconds since 1970
    rank: int | None = None

    def describe(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        text = self.message if self.message.startswith(where) else f"{where}{self.message}"
        return text if self.kind in (STOPPED, KILLED, LOST) else f"{self.kind}: {text}"


def note_begin(folder: Path, pending: Sequence[Ending] = ()) -> None:
    """Notes that an attempt has begun, and forgets the previous one. The caller has claimed the
    run's folder. `pending`: endings of earlier attempts without a restart in the log."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    (folder / FOLDER).mkdir()
    begun = {"time": time.time(), "pending": [asdict(ending) for ending in pending]}
    _write(folder / FOLDER / _BEGUN, begun)


def note_end(folder: Path, who: str, ending: Ending) -> None:
    """Notes how an attempt ended for `who` (a rank, the launcher). If the disk is full or gone,
    only the note is lost."""
    with suppress(OSError):
        if (folder / FOLDER / _BEGUN).exists():
            _write(folder / FOLDER / f"{who}.json", asdict(ending))


def forget_attempt(folder: Path) -> None:
    """Removes the record of a complete run."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def find_begin(folder: Path) -> float | None:
    """The time when the last attempt began (since 1970), unless it completed the run."""
    begun = _read(folder / FOLDER / _BEGUN)
    return None if begun is None else float(begun["time"])


def read_endings(folder: Path) -> list[Ending]:
    """Endings of attempts without a restart in the log, the last one last. Empty if the run is new
    or complete."""
    begun = _read(folder / FOLDER / _BEGUN)
    if begun is None:
        return []
    notes = [_read(path) for path in sorted((folder / FOLDER).glob("*.json"))]
    endings = [Ending(**note) for note in notes if note is not None and "kind" in note]
    step, when = _find_last_logged(folder, float(begun["time"]))
    lost = Ending(LOST, "all ranks were killed, or their machine was lost", step, when)
    pending = [Ending(**note) for note in begun.get("pending", [])]
    return [*pending, choose_cause([*endings, lost])]


def choose_cause(endings: Sequence[Ending]) -> Ending:
    """The ending that explains the others: the death of a process before a rank's own failure, and
    that before the errors of its peers. Its step is the furthest of all, its time the first."""

    def explains(ending: Ending) -> tuple[int, float]:
        order = {KILLED: 0, STOPPED: 2, "RemoteError": 3, "TransportError": 4, LOST: 5}
        died = ending.kind.startswith("SIG")
        return order.get(ending.kind, 0 if died else 1), ending.time

    cause = min(endings, key=explains)
    step = max(ending.step for ending in endings)
    noted = [ending.time for ending in endings if ending.kind != LOST] or [cause.time]
    return Ending(cause.kind, cause.message, step, min(noted), cause.rank)


def is_repeated(before: Sequence[Ending], last: Ending) -> bool:
    """Whether a program's failure has happened twice in a row, at the same step."""
    return (
        bool(before)
        and last.kind not in _FROM_OUTSIDE
        and (before[-1].kind, before[-1].message, before[-1].step)
        == (last.kind, last.message, last.step)
    )


def find_repeated(folder: Path) -> Ending | None:
    """The failure that happened twice in a row at the same step, if the last two attempts ended
    with it."""
    fresh = read_endings(folder)
    before = [Ending(**entry["restart"]["ending"]) for entry in read_restarts(folder)]
    return fresh[-1] if fresh and is_repeated([*before, *fresh[:-1]], fresh[-1]) else None


def explain_repeated(failure: Ending) -> str:
    """Why the run is not restarted automatically."""
    return (
        f"the run has failed twice at step {failure.step:,} with {failure.describe()}: it is not "
        "started again by itself; once the cause is fixed, start it with --resume instead of "
        "--resume auto"
    )


def describe_restart(ending: Ending, step: int, now: float) -> dict[str, Any]:
    """The line of metrics.jsonl about a run that continues after `step`."""
    at = datetime.fromtimestamp(ending.time, UTC).isoformat(timespec="seconds")
    restart = {
        "ended": at,
        "why": ending.describe(),
        "seconds": round(max(0.0, now - ending.time), 3),
        "repeated_steps": max(0, ending.step - step),
        "ending": asdict(ending),
    }
    return {"step": step, "restart": restart}


def explain_restart(entry: Mapping[str, Any]) -> str:
    """Describes such a line of metrics.jsonl."""
    restart = entry["restart"]
    failed, again = restart["ending"]["step"], restart["repeated_steps"]
    return (
        f"restarted: {restart['why']} (at step {failed:,}, {restart['ended']}); goes on after "
        f"{restart['seconds']:,.0f} s, with {again:,} step{'s' * (again != 1)} to make again"
    )


def read_restarts(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about restarts."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if '"restart"' in line:
            with suppress(ValueError):  # half a line, of a run that was killed
                found.append(json.loads(line))
    return found


def _find_last_logged(folder: Path, begun: float) -> tuple[int, float]:
    """The last step in the logs and its time, for attempts without a record."""
    step, when = 0, begun
    for name, ahead in (("metrics.jsonl", 0), ("ledger.jsonl", 1)):  # the ledger counts from 0
        with suppress(OSError, ValueError, KeyError, IndexError):
            path = folder / name
            last = path.read_text(encoding="utf-8", errors="replace").splitlines()[-1]
            step = max(step, int(json.loads(last)["step"]) + ahead)
            when = max(when, path.stat().st_mtime)
    return step, when


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(entry) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found
