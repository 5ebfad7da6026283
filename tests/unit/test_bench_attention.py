"""`freescale bench attention` through Triton's interpreter, with tiny sizes."""

from __future__ import annotations

import pytest
from freescale_bench.attention import bench
from helpers import attention_bench, interpreter


@pytest.fixture(scope="module")
def measured():
    return interpreter.interpreted(attention_bench.__file__)


def test_every_claim_has_a_figure(measured):
    """But for SDPA's FLASH backend, which is for GPUs alone."""
    figures, texts = measured["figures"], [claim["claim"] for claim in measured["claims"]]
    targets = list(bench.list_targets(attention_bench.SIZE))
    missing = [target.figure for target in targets if target.figure not in figures]
    assert len(targets) == 10 and [name for name in missing if "FLASH" not in name] == []
    assert len(texts) == 8 and all(value > 0 for value in figures.values())


def test_arms_are_timed_both_ways(measured):
    arms = {(row["arm"], row["way"]) for row in measured["rows"]}
    assert arms == {
        (arm, way)
        for arm in ("ours", "ours, keyed dropout", "SDPA math", "without biases", "both biases",
                    "full", "semi-local")
        for way in bench.WAYS
    }  # fmt: skip
    rows = {(row["what"], row["arm"], row["way"]): row["ms"]["median"] for row in measured["rows"]}
    for kind in ("SiLU", "softmax"):
        full, seen = (
            rows[f"first 3, last 8 of 40, {kind}", arm, "forward"] for arm in ("full", "semi-local")
        )
        assert measured["figures"][f"forward semi-local, {kind}"] == full / seen


def test_semi_local_attention_equals_the_masked_reference(measured):
    for kind in ("SiLU", "softmax"):
        assert measured["figures"][f"error, {kind}"] < bench.LIMIT
