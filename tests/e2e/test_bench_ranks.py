"""`freescale bench dynamic step` on two ranks: what it measures, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.command import freescale

from freescale.embedding.dynamic_rules import SHARDS

ROOT = Path(__file__).resolve().parents[2]
ROWS = 10 * SHARDS


def test_a_full_table_on_two_ranks(tmp_path):
    """A step counts the rows of one batch on each rank: together never more than there is room
    for. The folder that the ranks share is gone in the end."""
    done = freescale(
        *("bench", "dynamic", "step", "--device", "cpu", "--nproc", 2),
        *("--rows", ROWS, "--steps", 10, "--samples", 2),
        PYTHONPATH=str(ROOT / "src"),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["arm"] for row in rows] == ["static", "device map", "host map"]
    static, *dynamic = rows
    assert static["dynamic_rows"] == 0
    for row in dynamic:
        assert row["ranks"] == 2 and row["dynamic_inserted"] > 0
        assert 0.99 * ROWS < row["dynamic_rows"] <= ROWS, row["arm"]
    assert list(tmp_path.rglob("*.parquet")) == []
