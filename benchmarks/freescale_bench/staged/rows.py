"""From ledgers to the rows of the staged benchmark, and from rows to its claims. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from freescale.ledger.merge import merge_step
from freescale_bench.common.results import Claim, at_least, at_most, spread
from freescale_bench.common.turns import EMBEDDING
from freescale_bench.staged.arms import DEDUPLICATED, SERIAL, STAGED, STALE, TORCHREC

TENTH = "10 % collisions"

# The peak of a process has a target for large batches only. Besides the rows of the next batch,
# staged keeps about 100 bytes of ids and positions for each row (0.2 batches at 512 bytes a row)
# and some pieces under way (0.1). Of smaller batches the peak mostly shows how much free memory
# the heap keeps: some 20 to 30 MB, whatever the batch.
_LARGE_BATCH = 100_000_000  # bytes
_EXTRA_BATCHES = 1.4


def spread_with_mean(values: Sequence[float]) -> dict[str, float]:
    return {
        name: round(value, 3)
        for name, value in (spread(values) | {"mean": statistics.fmean(values)}).items()
    }


def summarize(
    measured: Sequence[Mapping[str, Any]], reference: Sequence[float], samples: int
) -> dict[str, Any]:
    """Summarizes one arm over all ranks. `reference`: the serial schedule's losses. `samples`: of a
    global batch."""
    steps = list(zip(*(rank["records"] for rank in measured), strict=True))  # [steps][ranks]
    figures = [merge_step(records) for records in steps]
    slowest = [max(r["end"] - r["begin"] for r in records) / 1e6 for records in steps]
    exposed = [f["exposed_ms"] for f in figures]
    sent = {
        kind: statistics.fmean(f["bytes"][kind] for f in figures) for kind in figures[0]["bytes"]
    }
    lanes = [_mean(r["counters"].get("lanes_ns", 0) / 1e6 for r in records) for records in steps]
    stopped = [_mean(_sum_stopped(r) for r in records) for records in steps]
    losses = measured[0]["losses"]
    return {
        "step_ms": spread_with_mean(slowest),
        "samples_per_second": spread_with_mean([samples / ms * 1e3 for ms in slowest]),
        # medians by kind; totals below are medians of sums
        "exposed_ms": {kind: statistics.median(e[kind] for e in exposed) for kind in exposed[0]},
        "exposed_embedding_ms": spread_with_mean(
            [sum(e[kind] for kind in EMBEDDING) for e in exposed]
        ),
        "exposed_all_ms": spread_with_mean([sum(e.values()) for e in exposed]),
        "straggler_ms": spread_with_mean([_mean(f["straggler_ms"]) for f in figures]),
        # All time that compute waited for embeddings: exposed, straggler, and work of lanes.
        "embedding_wait_ms": spread_with_mean([a + b for a, b in zip(stopped, lanes, strict=True)]),
        "compute_ms": statistics.median(_mean(f["compute_ms"]) for f in figures),
        "collision_exchange_ms": statistics.median(_time_exchange(records) for records in steps),
        "collision_percent": statistics.fmean(found)
        if (found := _list_collisions(figures))
        else None,
        "bytes_per_step": sent,
        "dense_percent_of_bytes": 100 * sent["dense"] / sum(sent.values()),
        "spans_ms": {
            name: statistics.median(f["spans_ms"].get(name, 0.0) for f in figures)
            for name in figures[0]["spans_ms"]
        },
        "largest_relative_loss_difference_to_serial": max(
            abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)
        ),
    }


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _list_collisions(figures: Sequence[Mapping[str, Any]]) -> list[float]:
    return [f["collision_percent"] for f in figures if "collision_percent" in f]


def _sum_stopped(record: Mapping[str, Any]) -> float:
    """Milliseconds that the main thread waited for its own embedding collectives; waits for lanes
    are in `lanes_ns`."""
    if "lanes_ns" in record["counters"]:
        return 0.0
    waits = [done - waited for kind, *_, waited, done in record["collectives"] if kind in EMBEDDING]
    return float(sum(waits)) / 1e6


def _time_exchange(records: Sequence[Mapping[str, Any]]) -> float:
    """Milliseconds of stages 5 and 6: from the last rank's start of 5 until the end of 6, mean over
    ranks. Includes the update in between. The records of the urgent lane come last."""
    if any("lanes_ns" not in record["counters"] for record in records):
        return 0.0
    last = [[c for c in record["collectives"] if c[0] in EMBEDDING][-2:] for record in records]
    begin = max(fifth[3] for fifth, _ in last)
    # without collisions there may be no wait
    return _mean(max(0, sixth[5] - begin) / 1e6 for _, sixth in last)


def correlate_squared(x: Sequence[float], y: Sequence[float]) -> float:
    return float(statistics.correlation(x, y) ** 2)


def make_claims(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> list[Claim]:
    """Makes all claims from the rows. `limits`: of the exposed share, by configuration."""
    by_key = {(r["configuration"], r["arm"]): r for r in rows if "arm" in r and "step_ms" in r}
    rates = [
        r
        for r in rows
        if r.get("arm") == STAGED and "collisions" in r and r.get("sweep") == "collisions"
    ]

    def median(configuration: str, arm: str, figure: str) -> float:
        return float(by_key[configuration, arm][figure]["median"])

    found = []
    for configuration, limit in limits.items():
        others = [arm for arm in (SERIAL, TORCHREC) if (configuration, arm) in by_key]
        for other in others:
            share = median(configuration, STAGED, "exposed_embedding_ms") / median(
                configuration, other, "exposed_embedding_ms"
            )
            found.append(
                at_most(
                    f"{configuration}: exposed embedding communication over {other}'s",
                    limit,
                    share,
                    "x",
                )
            )
        # Stages 5 and 6 also delay counts and dense gradients, which share the link: attribute the
        # whole delay to them.
        plain = median(configuration, SERIAL, "exposed_all_ms") - median(
            configuration, SERIAL, "exposed_embedding_ms"
        )
        share = (median(configuration, STAGED, "exposed_all_ms") - plain) / median(
            configuration, SERIAL, "exposed_embedding_ms"
        )
        text = (
            f"{configuration}: the same over serial's, with what counts and dense gradients "
            "wait longer than in serial"
        )
        found.append(at_most(text, limit, share, "x"))
        if TORCHREC in others:
            rate = median(configuration, STAGED, "samples_per_second") / median(
                configuration, TORCHREC, "samples_per_second"
            )
            text = f"{configuration}: samples/s over TorchRec's"
            found.append(at_least(text, 1.5, rate, "x"))
    collisions = [r["collisions"] for r in rates]
    for figure in ("exposed_embedding_ms", "exposed_all_ms"):
        linear = correlate_squared(collisions, [r[figure]["median"] for r in rates])
        found.append(at_least(f"{figure} is linear in the collision rate: R^2", 0.97, linear, ""))
    slower = {
        r["configuration"]: r["step_ms"]["median"] - median(r["configuration"], STALE, "step_ms")
        for r in rates
    }
    for r in rates:
        over = slower[r["configuration"]] - r["collision_exchange_ms"]
        text = (
            f"{r['configuration']}: a staged step over a stale step plus the collision "
            "exchange (stages 5 and 6, no straggler)"
        )
        found.append(at_most(text, 0.0, over, "ms"))
    found += _make_checks(rows, by_key, rates)
    return found


def _make_checks(
    rows: Sequence[Mapping[str, Any]],
    by_key: Mapping[tuple[str, str], Mapping[str, Any]],
    rates: Sequence[Mapping[str, Any]],
) -> list[Claim]:
    """Checks the benchmark itself, and that staged computes what serial computes."""
    found = []
    off = max(abs(r["collision_percent"] - r["collisions"]) for r in rates)
    found.append(
        at_most(
            "largest difference of the collision rate from the requested one", 1.0, off, "points"
        )
    )
    serial = by_key[TENTH, SERIAL]
    ratio = serial["compute_ms"] / serial["exposed_embedding_ms"]["median"]
    found.append(
        at_most(
            f"{TENTH}: compute over serial's embedding communication, off 1.2 by",
            0.1,
            abs(ratio - 1.2),
            "x",
        )
    )
    dense = max(r["dense_percent_of_bytes"] for r in by_key.values())
    found.append(at_most("dense gradients, share of the bytes", 5.0, dense, "%"))
    for name, limit, arms in (
        ("staged", 0.0, (STAGED,)),
        ("TorchRec", 1e-3, (TORCHREC, DEDUPLICATED)),
    ):
        drifts = [
            r["largest_relative_loss_difference_to_serial"]
            for (_, arm), r in by_key.items()
            if arm in arms
        ]
        if drifts:
            text = f"{name}: largest difference of any loss to serial's"
            found.append(at_most(text, limit, max(drifts), "relative"))
    for r in rows:
        if r.get("batch_bytes", 0) >= _LARGE_BATCH:
            text = (
                f"{r['configuration']}: staged over serial, over one batch of ids and rows "
                f"(rank {r['rank']})"
            )
            found.append(at_most(text, _EXTRA_BATCHES, r["extra_batches"], "x"))
    return found
