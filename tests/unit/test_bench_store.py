"""The benchmark of the event store, on a few users."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
from freescale_bench.common.results import Destination
from freescale_bench.store import bench


def test_generated_histories_are_in_order_of_time(tmp_path):
    bench.generate(tmp_path / "a.parquet", 20_000, 0, 5000, seed=1)
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert len(table) == 4
    for user in table:
        times = np.array(user["timestamp"]) - bench._START
        assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < 5000
        assert set(user["action"]) <= set(bench._ACTIONS)


def test_every_step_is_measured(tmp_path):
    bench.bench_store(60_000, tmp_path / "work", False, Destination(tmp_path, "0"))
    result = json.loads((tmp_path / "store-cpu.json").read_text())
    assert [row["step"] for row in result["rows"]] == list(bench._STEPS)
    build, _, added, _, read = result["rows"]
    assert build["events"] > 50 * added["events"] > 0 and added["segments"] == 2
    assert read["batches"] > 0 and 0 < read["mean_history"] <= bench._LONGEST_HISTORY
    assert len(result["claims"]) == 3 and not list((tmp_path / "work").iterdir())
