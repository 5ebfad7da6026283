"""Reads a run's folder for the report. Missing files are listed on the page; a damaged file is an
error that names it."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freescale.config.features import SOURCES
from freescale.config.origin import Origin
from freescale.ledger.summary import Summary
from freescale.ledger.trace import COMMUNICATION_LANE

WARM_UP = 2  # first steps, which are not averaged


@dataclass(frozen=True)
class Run:
    """The files of a run, as plain data."""

    name: str
    config: dict[str, Any]  # config.json; empty if there is none
    ledger: dict[str, Any]  # ledger.json
    steps: list[dict[str, Any]]  # ledger.jsonl
    metrics: list[dict[str, Any]]  # metrics.jsonl
    events: list[dict[str, Any]]  # of trace.json.gz
    features: list[dict[str, Any]] = field(default_factory=list)  # of features/features.json
    missing: list[str] = field(default_factory=list)  # descriptions of what the page cannot show
    notes: list[str] = field(default_factory=list)  # for readers

    @property
    def measured(self) -> bool:
        """Whether the ledger has figures: a run that ended early, or has just begun, has none."""
        return bool(self.ledger.get("measured_steps"))

    @property
    def measured_lines(self) -> list[dict[str, Any]]:
        """The lines of ledger.jsonl whose means are the figures of the ledger."""
        own = [line for line in self.steps if _count_ranks(line) == self.ledger.get("ranks")]
        return own[WARM_UP:]

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation of the validation part: its metric, value, step and whether its
        checkpoint is kept. None if the run did not compare them, or none had a value."""
        noted = (entry["best"] for entry in reversed(self.metrics) if "best" in entry)
        found: dict[str, Any] = next(noted, {})
        return found if found.get("step") is not None else None


def _count_ranks(line: dict[str, Any]) -> int:
    return len(line["straggler_ms"])


def read_runs(folders: list[Path]) -> list[Run]:
    """Reads runs, and names them by the shortest ends of their paths that differ."""
    depth = 1
    parts = [folder.resolve().parts for folder in folders]
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return [
        read_run(folder, "/".join(part[-depth:]))
        for folder, part in zip(folders, parts, strict=True)
    ]


def read_run(folder: Path, name: str | None = None) -> Run:
    """Reads a run, which is named after its folder by default. Your own loop with a `Ledger` leaves
    no config.json and perhaps no metrics.jsonl. ValueError if the folder is not that of a run, or a
    file in it is damaged."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not the folder of a run: there is no such folder")
    if not any((folder / file).exists() for file in _ENOUGH):
        lacking = " and no ".join(_ENOUGH)
        raise ValueError(f"{folder} is not the folder of a run: it has no {lacking}")
    missing: list[str] = []
    config = _read_config(folder / "config.json", missing)
    steps = _read_lines(folder / "ledger.jsonl", missing)
    metrics = _read_lines(folder / "metrics.jsonl", missing)
    ledger = _read_ledger(folder, steps, missing)
    events = _read_trace(folder / "trace.json.gz", missing)
    if ledger.get("measured_steps"):
        missing += [words for key, words in _LATER.items() if not ledger.get(key)]
    if steps and not any("before" in figures for figures in steps):
        missing.append(
            "histories and costs of each rank before and after balancing (older version)"
        )
    transfers = [event for event in events if event.get("tid") == COMMUNICATION_LANE]
    carried = any(event.get("args", {}).get("path") for event in transfers)
    if any(event.get("ph") == "X" for event in transfers) and not carried:
        missing.append(
            "what carried each transfer of the timeline, and for which lane (older version)"
        )
    notes = _describe_other_ranks(ledger)
    if (origin := config.get("origin")) is not None:
        notes.insert(0, f"The run {Origin(**origin).describe()}.")
    name = name or folder.resolve().name
    features = _read_features(folder / "features" / "features.json")
    return Run(name, config, ledger, steps, metrics, events, features, missing, notes)


def _read_features(path: Path) -> list[dict[str, Any]]:
    """The features of a run; none if the run has no file of them."""
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [feature for source in SOURCES for feature in found[source]]


def _describe_other_ranks(ledger: dict[str, Any]) -> list[str]:
    """A note about a run that was resumed on another number of ranks."""
    others = ledger.get("steps_on_other_ranks") or {}
    if not others:
        return []
    made = " and ".join(
        f"{count:,} steps on {_format_ranks(int(r))}" for r, count in others.items()
    )
    present = _format_ranks(ledger["ranks"])
    return [
        f"The run also made {made}. Figures and timeline are of its steps on {present}; the curves "
        "show all steps."
    ]


def _format_ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


# Any of these makes a folder that of a run.
_ENOUGH = ("config.json", "ledger.json", "ledger.jsonl")
# Figures that runs of older versions lack.
_LATER = {
    "busy_ms_per_rank": "what each rank did when it did not wait (older version)",
    "machines": "the machine (older version, or the run did not end)",
}
_NEEDED = (
    *("ranks", "measured_steps", "step_ms", "samples_per_second", "straggler_percent"),
    *("exposed_percent", "exposed_ms", "bytes_per_step", "imbalance", "compute_ms_per_rank"),
    "straggler_ms_per_rank",
)


def _read_config(path: Path, missing: list[str]) -> dict[str, Any]:
    if not path.exists():
        missing.append("config.json: the settings are unknown")
        return {}
    return _parse_json(path, path.read_bytes())


def _read_ledger(folder: Path, steps: list[dict[str, Any]], missing: list[str]) -> dict[str, Any]:
    """Reads ledger.json, or recomputes it if ledger.jsonl has more steps. For a run without
    figures, adds the reason to `missing`."""
    path = folder / "ledger.json"
    ledger = _parse_json(path, path.read_bytes()) if path.exists() else {}
    further = len(steps) > (ledger.get("steps", len(steps)) if ledger else 0)
    # Earlier versions averaged over steps on different numbers of ranks.
    mixed = len({_count_ranks(line) for line in steps}) > 1 and "steps_on_other_ranks" not in ledger
    if further:
        missing.append(
            "ledger.json: the run did not end; its figures are those of the steps in ledger.jsonl"
        )
    if further or mixed:
        summary = Summary(_count_ranks(steps[-1]))
        for figures in steps:
            summary.add(figures)
        ledger = {**ledger, **summary.summarize()}
    if not ledger:
        missing.append(
            "where the time went: the run ended before its first figures, or is still "
            "on the way to them"
        )
    elif ledger.get("measured_steps") == 0:
        missing.append(
            f"where the time went: the run made {ledger.get('steps', 0)} steps, and "
            "the first two are warm-up"
        )
    elif lacking := [name for name in _NEEDED if name not in ledger]:
        raise ValueError(f"{path} is damaged: it has no {', '.join(lacking)}")
    return ledger


def _read_trace(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        missing.append(
            "trace.json.gz: there is no timeline (the run did not end, or had --trace-steps 0)"
        )
        return []
    try:
        with gzip.open(path, "rb") as file:
            text = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    trace = _parse_json(path, text)
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError(f"{path} is damaged: it is not a trace")
    for event in events:
        if not isinstance(event, dict) or (
            event.get("ph") == "X" and not {"name", "pid", "tid", "ts", "dur"} <= set(event)
        ):
            raise ValueError(f"{path} is damaged: {event} is not an event of a trace")
    return events


def _read_lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """Reads a file with a JSON object per line. A killed run may leave half a line at the end."""
    if not path.exists():
        missing.append(f"{path.name}")
        return []
    lines = path.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_parse_json(path, line, f", line {number}"))
        except ValueError:
            if number < len(lines):
                raise
            missing.append(f"the last line of {path.name}: it is not whole")
    return found


def _parse_json(path: Path, text: bytes, where: str = "") -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:  # JSON or encoding
        raise ValueError(f"{path}{where} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}{where} is damaged: {str(found)[:60]} is not an object")
    return found
