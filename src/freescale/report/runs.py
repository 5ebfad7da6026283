"""A run's folder, read for the report. What is missing is said; what is damaged is an error that
names the file."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freescale.ledger.trace import rename_lane


@dataclass(frozen=True)
class Run:
    """What a run left behind, as plain data."""

    name: str
    config: dict[str, Any]
    ledger: dict[str, Any]  # ledger.json
    steps: list[dict[str, Any]]  # ledger.jsonl
    metrics: list[dict[str, Any]]  # metrics.jsonl
    events: list[dict[str, Any]]  # of trace.json.gz
    missing: list[str] = field(default_factory=list)  # in words, for the page

    @property
    def measured(self) -> bool:
        """Whether the ledger has figures: a run that ended early, or has just begun, has none."""
        return bool(self.ledger.get("measured_steps"))


def read_runs(folders: list[Path]) -> list[Run]:
    """All runs, with names that tell them apart."""
    depth = 1
    parts = [folder.resolve().parts for folder in folders]
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return [
        read_run(folder, "/".join(part[-depth:]))
        for folder, part in zip(folders, parts, strict=True)
    ]


def read_run(folder: Path, name: str | None = None) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not the folder of a run: there is no such folder")
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json")
    missing: list[str] = []
    config = _parsed(folder / "config.json", (folder / "config.json").read_bytes())
    steps = [_rename_lanes(line) for line in _lines(folder / "ledger.jsonl", missing)]
    metrics = _lines(folder / "metrics.jsonl", missing)
    ledger = _ledger(folder, steps, missing)
    events = _events(folder / "trace.json.gz", missing)
    if ledger.get("measured_steps"):
        missing += [words for key, words in _LATER.items() if not ledger.get(key)]
    if steps and not any("before" in figures for figures in steps):
        missing.append(
            "histories and costs of each rank before and after balancing (older version)"
        )
    if events and not any(event.get("args", {}).get("path") for event in events):
        missing.append(
            "what carried each transfer of the timeline, and for which lane (older version)"
        )
    return Run(name or folder.resolve().name, config, ledger, steps, metrics, events, missing)


# Figures that runs of older versions lack.
_LATER = {
    "busy_ms_per_rank": "what each rank did when it did not wait (older version)",
    "machines": "the machine (older version, or the run did not end)",
}
_NEEDED = (
    "ranks",
    "measured_steps",
    "step_ms",
    "samples_per_second",
    "straggler_percent",
    "exposed_percent",
    "exposed_ms",
    "bytes_per_step",
    "imbalance",
    "compute_ms_per_rank",
    "straggler_ms_per_rank",
)


def _ledger(folder: Path, steps: list[dict], missing: list[str]) -> dict[str, Any]:
    """ledger.json, or what the lines of ledger.jsonl say where these go further; of a run without
    figures, why it has none."""
    path = folder / "ledger.json"
    ledger = _rename_lanes(_parsed(path, path.read_bytes())) if path.exists() else {}
    if len(steps) > (ledger.get("steps", len(steps)) if ledger else 0):
        # imports torch; only a run that did not end needs it
        from freescale.ledger.summary import Summary

        missing.append(
            "ledger.json: the run did not end; its figures are those of the steps in ledger.jsonl"
        )
        summary = Summary(len(steps[-1]["straggler_ms"]))
        for figures in steps:
            summary.add(figures)
        ledger = {**ledger, **summary.result()}
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


def _rename_lanes(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures of a step or run, with the present names of lanes in its spans."""
    spans = figures.get("spans_ms")
    if not isinstance(spans, dict):
        return figures
    return {**figures, "spans_ms": {rename_lane(name): value for name, value in spans.items()}}


def _events(path: Path, missing: list[str]) -> list[dict]:
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
    trace = _parsed(path, text)
    if not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is damaged: it is not a trace")
    for event in trace["traceEvents"]:
        if not isinstance(event, dict) or (
            event.get("ph") == "X" and not {"name", "pid", "tid", "ts", "dur"} <= set(event)
        ):
            raise ValueError(f"{path} is damaged: {event} is not an event of a trace")
    return trace["traceEvents"]


def _lines(path: Path, missing: list[str]) -> list[dict]:
    """Of a file with a JSON object a line. A run that was killed may have left half a line at the
    end."""
    if not path.exists():
        missing.append(f"{path.name}")
        return []
    lines = path.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_parsed(path, line, f", line {number}"))
        except ValueError:
            if number < len(lines):
                raise
            missing.append(f"the last line of {path.name}: it is not whole")
    return found


def _parsed(path: Path, text: bytes, where: str = "") -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:  # JSON or encoding
        raise ValueError(f"{path}{where} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}{where} is damaged: {str(found)[:60]} is not an object")
    return found
