"""The table of DLRM beside TorchRec, and the pooling factor at which both are level."""

from __future__ import annotations

import pytest
from freescale_bench.torchrec.table import format_torchrec


def make_row(factor, arm, rate):
    return {
        "factor": factor,
        "arm": arm,
        "samples_per_second": {"median": rate},
        "cpu_ms": {"median": 10.0},
        "bytes_per_step": {"rows": 2e6, "gradients": 1e6},
    }


def test_the_table_has_a_line_for_each_factor_and_the_crossover():
    result = {
        "command": "freescale bench torchrec",
        "machine": {"cpu": "a processor", "cores": 2, "gpu": None},
        "date": "2026-01-01T00:00:00Z",
        "shape": {"tables": 26, "rows": 1000, "width": 64, "popularity": 1.05, "samples": 512},
        "times_torchrec": {"1": 2.0, "4": 0.5},
        "crossover_factor": 2.0,
        "rows": [
            make_row(1, "freescale", 200.0),
            make_row(1, "TorchRec", 100.0),
            make_row(4, "freescale", 50.0),
            make_row(4, "TorchRec", 100.0),
        ],
    }
    text = format_torchrec({"torchrec-speed-hosts": result}, "results")
    assert "| 1 | 100, 200 | 2.00 x | 10, 10 | 3.0, 3.0 |" in text
    assert "| 4 | 100, 50 | 0.50 x |" in text and "Above about 2.0 ids TorchRec is faster" in text


def test_crossover():
    pytest.importorskip("torchrec")
    from freescale_bench.torchrec.speed import find_crossover

    assert find_crossover({1: 2.0, 4: 0.5, 20: 0.1}) == pytest.approx(2.0)
    assert find_crossover({1: 2.0, 4: 1.5}) is None


def test_pec_trains_as_torchrecs_base_pipeline_does():
    from freescale_bench.common.hosts import Loopback
    from freescale_bench.common.torchrec import has_pec
    from freescale_bench.common.workload import Workload
    from freescale_bench.ladder.arms import BASE, PEC, train_alone

    if not has_pec():
        pytest.skip("TorchRec has it from 1.9 on")
    sizes = dict(rows=300, width=16, samples=4, median_length=8, maximum_length=30, steps=6)
    workload = Workload(**sizes, row_optimizer="sgd", row_learning_rate=5.0)
    base, pec = (Loopback(2).run(train_alone, workload, name, 6) for name in (BASE, PEC))
    assert pec[0]["losses"] == pytest.approx(base[0]["losses"], rel=1e-6)
    assert base[0]["losses"][0] != base[0]["losses"][-1]
