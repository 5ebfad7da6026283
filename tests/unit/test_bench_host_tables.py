"""The benchmark of host tables: what it measures, and the ids that it trains on."""

from __future__ import annotations

import numpy as np
import pytest
from freescale_bench.common.workload import Workload, make_batches
from freescale_bench.host_tables.bench import collect_figures
from freescale_bench.host_tables.setting import choose_setting
from freescale_bench.train.shapes import write_interactions
from freescale_bench.train.trained import WARMUP


def test_sizes_of_an_h200():
    """Rows with Adam's moments make up the size; one rank trains the whole batch of the shape."""
    setting = choose_setting("cuda", 1, True, {})
    shape = setting.make_shape()
    assert 90e9 - 6144 < setting.items * (512 * 3 * 4) <= 90e9
    assert (shape.samples, shape.width, shape.layers) == (16, 512, 8)
    assert shape.draw_lengths().sum() < setting.items  # enough for rows that never come again
    four = choose_setting("cuda", 4, True, {})
    assert four.make_shape().samples == 4 * 8
    assert four.make_shape().draw_lengths().sum() < four.items
    assert not choose_setting("cpu", 1, True, {}).keep


def test_refusals():
    for given in ({"steps": 3}, {"shape": "square"}, {"size": "much"}):
        with pytest.raises(ValueError, match="steps|shape|size"):
            choose_setting("cuda", 1, True, given)


def test_ids_that_never_come_again(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    setting = choose_setting("cpu", 1, False, {"steps": 10})
    file = write_interactions(setting.make_shape(), tmp_path / "file.parquet", popularity=None)
    items = pq.read_table(file)["item_id"].to_numpy()
    assert len(items) > WARMUP * setting.samples
    assert len(np.unique(items)) == len(items)
    assert items.min() >= 1 and items.max() < setting.items


def test_ids_by_the_logarithm_of_their_rank():
    """Each once in a batch; the popular ones in most batches, others hardly twice."""
    workload = Workload(
        rows=100_000, samples=10, median_length=50.0, sigma=0.0, maximum_length=50,
        popularity="unique log", steps=30,
    )  # fmt: skip
    batches = [ids.numpy() for ids, _, _ in make_batches(workload, 0, 1)]
    assert all(len(np.unique(ids)) == len(ids) == 500 for ids in batches)
    counts = np.bincount(np.concatenate(batches), minlength=workload.rows)
    assert (counts >= 28).sum() > 20  # of the first ranks
    assert np.median(counts[counts > 0]) == 1
    assert min(ids.min() for ids in batches) >= 0


def test_windows_are_compared_one_by_one():
    """A window that is slow in both places does not count; one arm's outlier counts once."""
    base = {"steps_that_miss_on_the_main_thread": 0, "cache_miss_percent": 99.5, "table_s": 60.0}
    rows = [
        {"arm": f"{ids} device", "windows_ms": [10.0, 50.0, 10.0], **base}
        for ids in ("zipf", "uniform")
    ] + [
        {"arm": f"{ids} host", "windows_ms": [10.1, 50.5, 40.0], "cache_was_full": True, **base}
        for ids in ("zipf", "uniform")
    ]
    figures = collect_figures(rows)
    assert figures["zipf host"] == pytest.approx(1.01)
    assert figures["misses on the main thread"] == 0
