"""Writes the records of all ranks as a Chrome/Perfetto trace.

A rank is a process of the trace. Its lanes are compute, communication, and each thread that
communicates alongside the compute.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from freescale.ledger.record import StepRecord

COMPUTE_LANE, COMMUNICATION_LANE = 0, 1
LANES = ("compute", "communication", "ahead", "urgent", "input")


def make_header(ranks: int) -> list[dict[str, Any]]:
    """Events that name the ranks and their lanes."""
    events: list[dict[str, Any]] = []
    for rank in range(ranks):
        of_rank = {"ph": "M", "pid": rank}
        events.append({**of_rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events += [
            {**of_rank, "name": "thread_name", "tid": lane, "args": {"name": name}}
            for lane, name in enumerate(LANES)
        ]
    return events


def make_step_events(records: Sequence[Mapping[str, Any]], origin: int) -> list[dict[str, Any]]:
    """Trace events of one step, from a plain record per rank on one clock.

    A collective lasts from this rank's arrival to its end; `wait_us` is how long compute waited for
    it. `origin` is the trace's time 0 in nanoseconds.
    """
    events: list[dict[str, Any]] = []

    def add(rank: int, lane: int, name: str, begin: int, end: int, args: dict[str, Any]) -> None:
        timing = {"ts": (begin - origin) / 1e3, "dur": (end - begin) / 1e3}
        events.append({"ph": "X", "name": name, "pid": rank, "tid": lane, **timing, "args": args})

    for rank, step in enumerate(StepRecord.parse(record) for record in records):
        add(rank, COMPUTE_LANE, f"step {step.step}", step.begin, step.end, {})
        for span in step.spans:
            # A span of another thread is called `thread/name`.
            thread, name = span.name.split("/", 1) if "/" in span.name else ("compute", span.name)
            add(rank, LANES.index(thread), name, span.begin, span.end, {})
        for collective, carrier in zip(step.collectives, step.carriers, strict=True):
            args = {
                "sent_bytes": collective.sent,
                "received_bytes": collective.received,
                "wait_us": (collective.done - collective.waited) / 1e3,
                "lane": carrier.thread,
                "path": carrier.path,
            }
            add(rank, COMMUNICATION_LANE, collective.kind, collective.issued, collective.done, args)
    return events


def write_trace(path: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """Writes events as a gzipped trace file."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": list(events), "displayTimeUnit": "ms"}, file)
