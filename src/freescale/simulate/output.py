"""Writes simulated steps in the form of the ledger: `merge_step`, `Summary` and `write_trace` make
figures and trace, as for a real run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.ledger.merge import merge_step
from freescale.ledger.record import sum_paths
from freescale.ledger.summary import Summary
from freescale.ledger.trace import make_header, make_step_events, write_trace
from freescale.simulate.ranks import Step

# steps that fetch everything or have no previous batch: counted, not averaged (as in a real run)
WARMUP = 2
TRACED = 16  # ranks in the trace, at most


def make_records(step: Step) -> list[dict[str, Any]]:
    """Makes the records that `Ledger.drain` would return on each rank, in nanoseconds."""
    begin, end = _to_ns(step.begin), _to_ns(step.end)
    spans = [(name, _to_ns(a), _to_ns(b)) for name, a, b in step.spans]
    # kind, path, and of each rank: bytes sent, bytes received, issued, waited, done
    meetings = [
        (
            meeting.kind,
            meeting.path,
            *(np.rint(size).astype(np.int64).tolist() for size in (meeting.sent, meeting.received)),
            *(_to_ns(times) for times in (meeting.issued, meeting.waited, meeting.done)),
        )
        for meeting in step.meetings
    ]
    counters = {name: values.tolist() for name, values in step.counters.items()}
    return [
        {
            "step": step.number,
            "begin": begin[rank],
            "end": end[rank],
            "spans": [[name, a[rank], b[rank]] for name, a, b in spans],
            "collectives": [
                [kind, *(values[rank] for values in rest)] for kind, _, *rest in meetings
            ],
            "paths": sum_paths((kind, path, sent[rank]) for kind, path, sent, *_ in meetings),
            "counters": {name: values[rank] for name, values in counters.items()},
        }
        for rank in range(len(begin))
    ]


def _to_ns(seconds: NDArray[Any]) -> list[int]:
    times: list[int] = np.rint(seconds * 1e9).astype(np.int64).tolist()
    return times


def collect_run(steps: Iterable[Step], gpus: int, folder: Path | None = None) -> dict[str, Any]:
    """Returns the figures of a run, as in ledger.json. With a folder, writes `ledger.jsonl`,
    `ledger.json` and `trace.json.gz` (of the first TRACED ranks) there."""
    summary = Summary(gpus, WARMUP)
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    for step in steps:
        of_ranks = make_records(step)
        figures = merge_step(of_ranks)
        summary.add(figures)
        if folder is not None:
            lines.append(json.dumps(figures) + "\n")
            events += make_step_events(of_ranks[:TRACED], 0)
    result = summary.summarize()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ledger.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "ledger.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_trace(folder / "trace.json.gz", make_header(min(gpus, TRACED)) + events)
    return result
