"""Checkpoints in a store: kills during publications, and writers that were taken over."""

from __future__ import annotations

import shutil
from pathlib import Path

from freescale_bench.common.results import Destination, at_least, at_most, show_claims, write
from freescale_bench.stores.publications import kill_writers, write_late
from freescale_bench.stores.s3_server import BUCKET, ERRORS, LATENCY_S, run_s3

_KILLS, _WRITERS = 50, 25


def bench_publishing(folder: Path, trial: bool, to: Destination) -> None:
    from freescale.stores.path import StorePath

    folder.mkdir(parents=True)
    kills, writers = (3, 4) if trial else (_KILLS, _WRITERS)
    try:
        with run_s3(LATENCY_S, ERRORS) as server:
            root = StorePath(f"s3://{BUCKET}")
            # as many as it takes until so many kills hit a publication
            rows = kill_writers(root / "kills", kills, folder / "notes")
            late = write_late(root / "late", writers, folder / "late")
            requests = server.read_statistics()
    finally:
        shutil.rmtree(folder)
    during = sum(row["during"] for row in rows)
    attempts, where = late["attempts"], f"{LATENCY_S * 1000:.0f} ms, {ERRORS:.0%} errors"
    claims = [
        at_least(f"kills during a publication ({where})", kills, during, "kills"),
        at_most("of them, last complete checkpoint lost", 0, sum(r["lost"] for r in rows), ""),
        at_least(f"attempts of {writers} late writers refused", attempts, late["refused"], ""),
        at_most("newer checkpoints that they overwrote", 0, late["overwritten"], ""),
    ]
    if trial:
        show_claims(claims)
        return
    command, packages = "freescale bench stores publishing", ["s3fs", "moto"]
    write("stores-publishing", "cpu", command, [*rows, late, requests], claims, packages, to=to)
