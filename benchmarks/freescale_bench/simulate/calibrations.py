"""Compute curves for the simulator from committed results, for testbeds without `freescale simulate
calibrate`.

    python -m freescale_bench.simulate.calibrations

testbed-c  width 256, 4 heads, bf16, a quarter of an H200: attention of kernels-h200.json at a
           quarter of its rate, the rest (linear) from the arm `none` of
           balance-measured-4ranks-h200.json; its other arms and files are for validation
testbed-a  the token-wise MLP of staged-hosts.json: serial and stale without collisions, length 120
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from freescale_bench.common.repository import require_repository
from freescale_bench.common.results import read_committed as read
from freescale_bench.common.workload import draw_lengths


def make_curve(quadratic: float, linear: float) -> dict[str, float]:
    return {"quadratic": quadratic, "linear": linear, "sample": 0.0, "constant": 0.0}


def keep(
    name: str,
    source: str,
    like: dict[str, Any],
    shapes: list[dict[str, Any]],
    rows: dict[str, float],
    optimizer: dict[str, float],
    slowdown: dict[str, float],
    **more: Any,
) -> None:
    data = {
        "name": name,
        "source": source,
        "machine": like["machine"],
        "date": like["date"],
        "commit": like["commit"],
    }
    data |= {"shapes": shapes, "rows": rows, "optimizer": optimizer, "slowdown": slowdown, **more}
    (_folder() / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(name, json.dumps(data["shapes"]), json.dumps(rows), json.dumps(optimizer))


def _folder() -> Path:
    return require_repository() / "src" / "freescale" / "simulate" / "calibrations"


def derive_row_costs() -> dict[str, float]:
    """Returns seconds per key or byte on a whole H200."""
    ms = {row["case"]: row["ms"]["median"] for row in read("kernels-h200")["rows"] if "ms" in row}
    row = 4 * 128  # bytes: the benchmark's tables have width 128
    return {
        "deduplicate_per_key": ms["deduplicate 621,822 keys"] / 1e3 / 621_822,
        "compare_per_key": ms["masks of 250,000 and 89,268 rows"] / 1e3 / (250_000 + 89_268),
        "lookup_per_byte": ms["gather, 1,000,000 of 8,000,000 x 128"] / 1e3 / (1e6 * row),
        "update_per_byte": ms["rowwise_adagrad, 1,000,000 of 8,000,000 x 128"] / 1e3 / (1e6 * row)
        + ms["sum of duplicates, 250,000"] / 1e3 / (250_000 * row),
        "read_per_byte": ms["read, 621,822 tokens of 89,268 rows"] / 1e3 / (621_822 * row),
        "read_backward_per_byte": ms["read backward, 621,822 tokens of 89,268 rows"]
        / 1e3
        / (621_822 * row),
        "constant": 0.0,
    }


def derive_testbed_c(rows: dict[str, float]) -> None:
    kernels, data = read("kernels-h200"), read("balance-measured-4ranks-h200")
    ms = {row["case"]: row["ms"]["median"] for row in kernels["rows"] if "ms" in row}
    benched = np.minimum(
        np.random.default_rng(0).lognormal(np.log(3000), 1.0, 128).astype(np.int64), 21_000
    ).astype(float)
    none = next(row for row in data["rows"] if row["arm"] == "none")
    shape, per_rank = data["shape"], []
    for rank in range(4):  # as balance.measured.make_batches
        for number in range(2, data["steps"]):
            random = np.random.default_rng((7, rank, number))
            drawn = draw_lengths(random, shape["median"], shape["samples"], shape["cap"])
            length = drawn.astype(float)
            per_rank.append(((length**2).sum(), length.sum()))
    squares, tokens = np.mean(per_rank, axis=0)
    ways = {}
    for way in ("forward", "backward"):
        attention = (
            4
            * ms[f"attention {way}, log-normal, 128 samples, 4 heads of 64"]
            / 1e3
            / (benched**2).sum()
        )
        linear = (none["spans_ms"][way] / 1e3 / shape["layers"] - attention * squares) / tokens
        assert linear > 0, (way, attention, linear)
        ways[way] = make_curve(float(attention), float(linear))
    parameters = none["bytes_per_step"]["dense"] / 6 / 4
    source = (
        "kernels-h200.json at a quarter of its rate, and balance-measured-4ranks-h200.json, "
        f"commit {data['commit']}"
    )
    shapes = [{"width": 256, "heads": 4, "precision": "bf16", "longest": 21_000, **ways}]
    optimizer = {"per_parameter": none["spans_ms"]["optimizer"] / 1e3 / parameters, "constant": 0.0}
    quarter = {
        name: 4 * value for name, value in rows.items()
    }  # memory bandwidth is shared as well
    # With equal loads, 4 ranks still wait: the largest of four is 1.03 standard deviations above
    # their mean.
    equal = next(row for row in read("staged-4ranks-h200")["rows"] if row["arm"] == "serial")
    waited = equal["straggler_percent"]["median"] / 100 * equal["step_ms"]["median"]
    jitter = (
        waited
        / 1.03
        / float(np.hypot(*(equal["spans_ms"][way]["median"] for way in ("forward", "backward"))))
    )
    keep(
        "testbed-c",
        source,
        data,
        shapes,
        quarter,
        optimizer,
        {"collective": 1.162, "hostwire": 1.006},
        jitter=jitter,
        jitter_source="staged-4ranks-h200.json, serial: equal loads",
    )


def derive_testbed_a() -> None:
    data = read("staged-hosts")
    serial, stale = (
        next(
            row
            for row in data["rows"]
            if row["configuration"] == "0 % collisions" and row["arm"] == arm
        )
        for arm in ("serial", "stale")
    )
    tokens, row, passes = 64 * 120, 4 * 128, 10
    spans = {name: value / 1e3 for name, value in serial["spans_ms"].items()}
    ways = {way: make_curve(0.0, spans[way] / tokens / passes) for way in ("forward", "backward")}
    rows = {
        "deduplicate_per_key": spans["deduplicate"] / tokens,
        "compare_per_key": stale["spans_ms"]["ahead/compare"] / 1e3 / (2 * tokens),
        "lookup_per_byte": spans["lookup"] / (tokens * row),
        "update_per_byte": spans["update rows"] / (tokens * row),
        "read_per_byte": 0.0,  # included in forward and backward
        "read_backward_per_byte": 0.0,
        "constant": 0.0,
    }
    # Compute time lost in `stale`, without the lane's own work, as a share of its transfer time.
    own = (
        sum(spans[name] for name in ("deduplicate", "lookup", "update rows"))
        + rows["compare_per_key"] * 2 * tokens
    )
    lost = (stale["compute_ms"] - serial["compute_ms"]) / 1e3 - own
    share = lost / ((serial["exposed_ms"]["rows"] + serial["exposed_ms"]["gradients"]) / 1e3)
    slowdown = 1 / (1 - share)
    known = (
        sum(spans.values())
        + sum(serial["exposed_ms"].values()) / 1e3
        + serial["straggler_ms"]["mean"] / 1e3
    )
    # Jitter: two ranks with equal loads wait 0.564 standard deviations on average.
    source = (
        "serial and stale at 0 % collisions and length 120 of staged-hosts.json, commit "
        f"{data['commit']}: one pinned core a rank"
    )
    shapes = [{"width": 128, "heads": 1, "precision": "fp32", "longest": 240, **ways}]
    deviation = serial["straggler_ms"]["median"] / 1e3 / 0.564
    unknown = max(0.0, serial["step_ms"]["median"] / 1e3 - known)
    keep(
        "testbed-a",
        source,
        data,
        shapes,
        rows,
        {"per_parameter": 0.0, "constant": spans["optimizer"]},
        {"collective": slowdown, "hostwire": slowdown},
        jitter=deviation / float(np.hypot(spans["forward"], spans["backward"])),
        every_step=spans["data"] + spans["agree"] + unknown,
    )
    step = serial["step_ms"]["median"]
    print(f"lost {lost}, share {share}, slowdown {slowdown}, known {known} of {step} ms")


if __name__ == "__main__":
    derive_testbed_c(derive_row_costs())
    derive_testbed_a()
