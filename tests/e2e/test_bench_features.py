"""`freescale bench features preparation`, in small."""

from __future__ import annotations

import json

import pytest
from freescale_bench.features import preparation
from freescale_bench.features.__main__ import main
from freescale_bench.features.table import format_preparation


def test_rows_of_a_size(tmp_path):
    rows = list(preparation.measure(3000, 20_000, tmp_path))
    arms = [preparation.PLAIN, preparation.WITH, preparation.JOIN]
    assert [row["arm"] for row in rows] == arms
    assert {"read", "sort", "write"} <= set(rows[0]["stages"])
    assert {"read items", "fit items", "write items", "fit events"} <= set(rows[2]["stages"])
    for row in rows:
        assert 0 < row["libraries_bytes"] <= row["peak_bytes"]
        assert sum(stage["seconds"] for stage in row["stages"].values()) <= row["seconds"]


def test_claims_and_table(tmp_path, monkeypatch):
    def measure(items, events, work):
        assert work.is_dir()
        for arm in (preparation.PLAIN, preparation.WITH, preparation.JOIN):
            peak = 1 << 30 if arm != preparation.JOIN else (1 << 29) + 100 * items
            seconds = events / 100 if arm != preparation.JOIN else events / 200
            row = {"items": items, "events": events, "arm": arm}
            yield row | {"seconds": seconds, "peak_bytes": peak}

    monkeypatch.setattr(preparation, "measure", measure)
    words = ["--item-count", "1000", "--event-count", "5000", "--run-folder", str(tmp_path / "run")]
    assert main(["preparation", *words, "--folder", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "features-preparation-cpu.json").read_text())
    measured = [claim["measured"] for claim in result["claims"]]
    assert measured == pytest.approx([0.5001, 100, 0, 50])
    assert all(claim["holds"] for claim in result["claims"])
    assert not list((tmp_path / "run").iterdir())
    table = format_preparation({"features-preparation-cpu": result}, "results")
    assert "| 1,000 | 5,000 | 50 s, 1.07 GB |" in table and "100 bytes with each item" in table
