"""Records of all ranks as a Chrome/Perfetto trace: one process per rank; lanes for compute, for
communication and for each thread that communicates beside the compute."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

COMPUTE_LANE, COMMUNICATION_LANE = 0, 1
LANES = ("compute", "communication", "ahead", "urgent", "input")
_FORMER_LANES = {"coming": "input"}  # in the files of earlier versions


def rename_lane(name: str) -> str:
    """The present name of a lane, or of a span `lane/span`, out of a file of any version."""
    lane, slash, span = name.partition("/")
    return _FORMER_LANES.get(lane, lane) + slash + span


def header(ranks: int) -> list[dict]:
    events: list[dict] = []
    for rank in range(ranks):
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for lane, name in enumerate(LANES):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
            )
    return events


def step_events(records: Sequence[Mapping], origin: int) -> list[dict]:
    """Events of one step. A collective lasts from its arrival to its end; `wait_us` is how long
    compute stood still."""
    events: list[dict] = []

    def add(rank: int, lane: int, name: str, begin: int, end: int, args: dict) -> None:
        timing = {"ts": (begin - origin) / 1e3, "dur": (end - begin) / 1e3}
        events.append({"ph": "X", "name": name, "pid": rank, "tid": lane, **timing, "args": args})

    for rank, record in enumerate(records):
        add(rank, COMPUTE_LANE, f"step {record['step']}", record["begin"], record["end"], {})
        for name, begin, end in record["spans"]:
            thread, slash, short = name.partition("/")
            add(
                rank,
                LANES.index(thread) if slash else COMPUTE_LANE,
                short if slash else name,
                begin,
                end,
                {},
            )
        carriers = record.get("carriers", [[None, None]] * len(record["collectives"]))
        for (kind, sent, received, issued, waited, done), (thread, path) in zip(
            record["collectives"], carriers, strict=True
        ):
            args = {
                "sent_bytes": sent,
                "received_bytes": received,
                "wait_us": (done - waited) / 1e3,
            }
            args |= {"lane": thread, "path": path}
            add(rank, COMMUNICATION_LANE, kind, issued, done, args)
    return events


def write_trace(path: Path, events: Sequence[Mapping]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": list(events), "displayTimeUnit": "ms"}, file)
