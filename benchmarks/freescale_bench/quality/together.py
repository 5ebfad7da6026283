"""Several comparisons with the public HSTU together: the mean difference, and the lowest among data
sets with enough users."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.results import Destination, Result, Row, at_least, read_result, write
from freescale_bench.quality.bench import WORST

MEAN = 0.0  # percent: target of the mean difference
# Resampling 5,000 users changes a difference by 1 or 2 %, the 943 of MovieLens-100K by 6 %.
ENOUGH_USERS = 5_000


def bench_together(files: Sequence[Path], to: Destination) -> None:
    """Writes quality-together-TESTBED.json.

    Raises:
        ValueError: a file has no comparison with the peer, or is from another machine than the
            first.
    """
    results = [_read(path) for path in files]
    first = results[0]
    for path, result in zip(files, results, strict=True):
        if result["machine"]["gpu"] != first["machine"]["gpu"]:
            raise ValueError(f"{path} is from another machine than {files[0]}")
    rows = [
        row for path, result in zip(files, results, strict=True) for row in list_rows(path, result)
    ]
    percents = [row["percent"] for row in rows]
    enough = [row["percent"] for row in rows if row["users"] >= ENOUGH_USERS]
    about = f"{len(rows)} differences of HR@10 and NDCG@10 from the public HSTU"
    claims = [at_least(f"{about}: mean", MEAN, statistics.fmean(percents), "%")]
    if enough:
        text = f"lowest of those with at least {ENOUGH_USERS:,} users"
        claims.append(at_least(text, WORST, min(enough), "%"))
    newest = max(results, key=lambda result: str(result["date"]))
    write(
        "quality-together",
        files[0].stem.rpartition("-")[2],
        "freescale bench quality --together FILE ...",
        rows,
        claims,
        to=to,
        # machine and versions are those of the results
        machine=newest["machine"],
        versions=newest["versions"],
        method="relative differences of means over seeds, each of the same users",
    )


def list_rows(path: Path, result: Result) -> list[Row]:
    """Returns a row per metric that the result compares."""
    origin = {"file": path.name, "commit": result["commit"], "date": result["date"]}
    about = {"arm": result["rows"][0]["arm"], "data": result["dataset"]["name"]}
    users = result["rows"][0]["users"]
    return [
        {**about, "metric": metric, "users": users, **difference, "from": origin}
        for metric, difference in result["comparison"].items()
    ]


def _read(path: Path) -> Result:
    result = read_result(path)
    if not result.get("comparison"):
        raise ValueError(f"{path} compares nothing with the public HSTU: `bench quality --peer`")
    return result
