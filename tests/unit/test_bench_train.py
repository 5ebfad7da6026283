"""`freescale bench train`: its counts, against counts made another way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from freescale_bench.common.results import Destination
from freescale_bench.dlrm.shapes import FULL
from freescale_bench.train.bench import bench_train, collect_figures
from freescale_bench.train.flops import (
    count_flops,
    count_flops_as_mlperf,
    count_flops_as_nvidia,
)
from freescale_bench.train.measure import read_waits
from freescale_bench.train.shapes import SHAPES

from freescale.train.device_figures import measure_union


def test_flops_are_those_of_the_products_one_by_one() -> None:
    lengths, width, layers, heads = np.array([3, 0, 5]), 8, 2, 2
    total = 0
    for length in lengths:
        projections = 2 * length * width * (4 * width) + 2 * length * width * width
        pairs = sum(query + 1 for query in range(length))  # a query sees itself and what is before
        attention = heads * 2 * (2 * pairs * (width // heads))  # scores, and values
        total += layers * (projections * 3 + attention * 3.5)
    assert count_flops(lengths, width, layers, heads) == total


def test_nvidias_formula_gives_the_figure_that_nvidia_publishes() -> None:
    # 63.89 TFLOP with 3 contextual tokens, which see each other: 0.05 more than without
    counted = count_flops_as_nvidia(np.full(32, 4099), 1024, 8, 4) / 1e12
    assert counted == pytest.approx(63.85, abs=0.01)


def test_mlperfs_formula_gives_the_figure_that_mlperf_publishes() -> None:
    counted = count_flops_as_mlperf(np.array([4096]), FULL.width, FULL.layers, FULL.heads)
    assert counted / 1e9 == pytest.approx(315.7, abs=0.05) and FULL.tokens == 4096
    # 3.5 and 3 times the operations of the tokens one by one, as by the other formula
    wide = 2 * 2 * 4096 * 512 * 512 * 3 * 3  # two parts more of the output projection
    assert counted - wide == pytest.approx(
        count_flops(np.array([4096]), FULL.width, FULL.layers, FULL.heads), rel=1e-3
    )


def test_union_counts_time_once() -> None:
    intervals = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4), (6.0, 7.0)]
    assert measure_union(intervals) == pytest.approx(5.0)
    assert measure_union([]) == 0


def test_waits_are_those_of_the_steps_that_are_timed(tmp_path: Path) -> None:
    waits = [9.0, 0.0, 0.5, 7.0]
    lines = [
        {"step": step, "step_ms": 10.0, "spans_ms": {"await batch": wait} if wait else {}}
        for step, wait in enumerate(waits)
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_waits(tmp_path, range(1, 3)) == pytest.approx(2.5)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_lengths_are_those_of_the_shape(name: str) -> None:
    shape = SHAPES[name]
    lengths = replace(shape, users=500).draw_lengths() - 1
    assert len(lengths) == 500 and lengths.min() >= 1 and lengths.max() <= shape.cap
    if shape.lengths == "fixed":
        assert set(lengths) == {shape.cap}
    if shape.median and shape.median < shape.cap:
        assert np.median(lengths) == pytest.approx(shape.median, rel=0.03)


@pytest.mark.long
def test_headlines_are_the_defaults_and_are_compared(tmp_path, monkeypatch) -> None:
    headlines = ("short", "medium", "long", "wide")
    assert all(
        SHAPES[name].biases and not SHAPES[f"{name}, no biases"].biases for name in headlines
    )
    assert all(SHAPES[f"{name}, SASRec"].encoder == "sasrec" for name in headlines[:2])
    tiny = {"samples": 4, "width": 8, "cap": 12, "median": 6, "items": 50, "negatives": 4}
    tiny |= {"batches": 3, "warmup": 2, "windows": 1}
    names = ["short", "short, no biases", "short, SASRec"]
    small = {name: replace(SHAPES[name], **tiny) for name in names}
    monkeypatch.setattr("freescale_bench.train.bench.SHAPES", small)
    bench_train([], "cpu", None, True, Destination(tmp_path, "test"))
    (file,) = tmp_path.glob("train-*.json")
    result = json.loads(file.read_text())
    rows = {row["shape"]: row for row in result["rows"]}
    assert list(rows) == names and rows["short, SASRec"]["encoder"] == "sasrec"
    steps = {name: row["step_ms"]["median"] for name, row in rows.items()}
    claims = {claim["claim"]: claim["measured"] for claim in result["claims"]}
    share = steps["short, SASRec"] / steps["short"]
    assert claims["short, SASRec: step, of that of HSTU"] == pytest.approx(share, abs=1e-4)
    figures = collect_figures(result["rows"])
    assert figures["short biases"] == steps["short"] / steps["short, no biases"]


def test_sasrec_has_a_matrix_more() -> None:
    lengths = np.array([3, 5])
    more = count_flops(lengths, 8, 2, 2, matrices=6) - count_flops(lengths, 8, 2, 2)
    assert more == 2 * 3 * 8 * 2 * 8 * 8
