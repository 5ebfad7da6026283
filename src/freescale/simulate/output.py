"""Simulated steps in the ledger's own form: `merge_step` and `Summary` make the figures, `trace`
the picture, as of a real run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from freescale.ledger.merge import merge_step
from freescale.ledger.summary import Summary
from freescale.ledger.trace import make_header, make_step_events, write_trace
from freescale.simulate.ranks import Step

# steps that fetch everything, or compare with none: counted, not averaged (as in a measured run)
WARMUP = 2
TRACED = 16  # ranks in the trace, at most


def records(step: Step) -> list[dict[str, Any]]:
    """What each rank's ledger would have drained, in nanoseconds."""
    begin, end = _ns(step.begin), _ns(step.end)
    spans = [(name, _ns(a), _ns(b)) for name, a, b in step.spans]
    meetings = [
        (
            m.kind,
            m.path,
            np.rint(m.sent).astype(np.int64).tolist(),
            np.rint(m.received).astype(np.int64).tolist(),
        )
        + (_ns(m.issued), _ns(m.waited), _ns(m.done))
        for m in step.meetings
    ]
    counters = {name: values.tolist() for name, values in step.counters.items()}
    made = []
    for rank in range(len(begin)):
        paths: dict[str, dict[str, int]] = {}
        for kind, path, sent, *_ in meetings:
            of_kind = paths.setdefault(kind, {})
            of_kind[path] = of_kind.get(path, 0) + sent[rank]
        made.append(
            {
                "step": step.number,
                "begin": begin[rank],
                "end": end[rank],
                "spans": [[name, a[rank], b[rank]] for name, a, b in spans],
                "collectives": [
                    [kind, *(values[rank] for values in rest)] for kind, _, *rest in meetings
                ],
                "paths": paths,
                "counters": {name: values[rank] for name, values in counters.items()},
            }
        )
    return made


def _ns(seconds: np.ndarray) -> list[int]:
    return np.rint(seconds * 1e9).astype(np.int64).tolist()


def collected(steps: Iterable[Step], gpus: int, folder: Path | None = None) -> dict[str, Any]:
    """Figures of a run. With a folder, also `ledger.jsonl`, `ledger.json` and `trace.json.gz` there
    (of the first TRACED ranks)."""
    summary = Summary(gpus, WARMUP)
    lines: list[str] = []
    events: list[dict] = []
    for step in steps:
        of_ranks = records(step)
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
