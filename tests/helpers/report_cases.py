"""Folders of runs with known records, for the report's tests."""

from __future__ import annotations

import json
from pathlib import Path

from freescale.ledger.ledger import sum_busy
from freescale.ledger.merge import merge_step
from freescale.ledger.record import CollectiveRecord, Span
from freescale.ledger.summary import Summary
from freescale.ledger.trace import make_header, make_step_events, write_trace

MS = 1_000_000


def records(step: int, ranks: int = 2, balanced: bool = True, dynamic: bool = False) -> list[dict]:
    """Rank 0 arrives at 30 and waits until 45; the others arrive at 40: 10 ms straggler time for
    rank 0, 5 exposed for each. The lane's transfer stops nobody."""
    found = []
    for rank in range(ranks):
        begin = (step * 60) * MS
        ready = 40 if rank else 30
        spans = [
            ["forward", 2, ready - 10],
            ["backward", ready - 10, ready],
            ["optimizer", 45, 50],
            ["ahead/lookup", 5, 9],
        ]
        collectives = [["rows", 1000, 2000, 10, 20, 20], ["dense", 400, 400, ready, ready, 45]]
        counters = {"samples": 3 - rank % 2, "tokens": 100 + 20 * rank, "max_length": 60}
        if dynamic:
            counters |= {"dynamic_rows": 8 * (step + 1), "dynamic_capacity": 2048}
            names = ("inserted", "evicted", "swept", "turned_away", "waiting", "forgotten")
            counters |= {f"dynamic_{name}": 10 * n + rank for n, name in enumerate(names)}
        if balanced:
            counters |= {
                "before_cost": 10.0 + 5 * rank,
                "after_cost": 12.5,
                "after_samples": 2,
                "after_tokens": 110,
            }
            counters |= {
                "after_longest": 60,
                "max_predicted_imbalance": 1.0,
                "max_moved_tokens": 20,
            }
        timed = [Span(name, begin + a * MS, begin + b * MS) for name, a, b in spans]
        arrived = [
            CollectiveRecord(kind, sent, back, *(begin + t * MS for t in times))
            for kind, sent, back, *times in collectives
        ]
        found.append(
            {
                "step": step,
                "begin": begin,
                "end": begin + 55 * MS,
                "spans": timed,
                "collectives": arrived,
                "carriers": [["ahead", "gloo"], ["", "gloo"]],
                "busy": sum_busy(begin, begin + 55 * MS, timed, arrived),
                "paths": {"rows": {"gloo": 1000}, "dense": {"gloo": 400}},
                "counters": {**counters, "requests": 10, "collisions": 2},
            }
        )
    return found


def run_folder(
    folder: Path,
    steps: int = 12,
    ranks: int = 2,
    balanced: bool = True,
    older: bool = False,
    dynamic: bool = False,
) -> Path:
    """A run's folder; `older` leaves out what earlier versions did not write; `dynamic`: with a
    dynamic table, which grows."""
    folder.mkdir(parents=True)
    summary, lines, events = Summary(ranks), [], make_header(ranks)
    for step in range(steps):
        found = records(step, ranks, balanced, dynamic)
        figures = merge_step(found)
        if older:
            found = [
                {k: v for k, v in record.items() if k not in ("carriers", "busy")}
                for record in found
            ]
            figures = {
                k: v
                for k, v in merge_step(found).items()
                if k not in ("busy_ms", "before", "after", "exposed_ms_per_rank")
            }
        summary.add(figures)
        lines.append(json.dumps(figures))
        events += make_step_events(found, 0)
    result = summary.summarize()
    if older:
        del result["busy_ms_per_rank"], result["exposed_ms_per_rank"]
    else:
        result["machines"] = [
            {
                "cpu": "Cray-1 <b>",
                "cores": 1,
                "gpu": None,
                "versions": {"torch": "2.11"},
                "ranks": [0, 1],
            }
        ]
        result["peak_memory_bytes_per_rank"] = [{"host": 2**30}] * ranks
    metrics = [
        {"step": step + 1, "epoch": 0, "loss": 5 - step / 10, "samples_per_second": 9.0}
        for step in range(0, steps, 2)
    ]
    quality = {"model": {"hr@10": 0.25, "auc": None}, "popularity": {"hr@10": 0.125}}
    best = {"metric": "hr@10/unseen", "kept": True, "step": 7, "value": 0.4375, "since": 1}
    validation = {"model": {"hr@10": 0.2}}
    if not older:
        quality["model"] |= {"hr@10/unseen": 0.375, "hr@50/unseen": 0.6875, "repeats": 0.0625}
        quality["popularity"] |= {"hr@10/unseen": 0.1875}
        validation["model"] |= {"hr@50": 0.3, "hr@10/unseen": 0.4375}
    metrics += [
        {"step": steps, "validation": validation, **({} if older else {"best": best})},
        {"step": steps, "test": quality, **({} if older else {"of_step": 7})},
    ]
    config = {
        "data": {"data": "<script>alert(1)</script>"},
        "train": {"schedule": "staged", "global_batch": 5},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "ledger.json").write_text(json.dumps(result))
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    write_trace(folder / "trace.json.gz", events)
    return folder
