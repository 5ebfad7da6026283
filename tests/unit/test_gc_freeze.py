"""While a schedule runs, the collector leaves alone what was there before it."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.toys import Clicks, clicks_batch

import freescale
from freescale.pipeline import process_memory
from freescale.transport.local import LocalTransport


def pipeline(schedule):
    parallel = freescale.parallelize(
        Clicks(), Clicks.ids, freescale.SGD(lr=0.1), transport=LocalTransport()
    )
    return freescale.Pipeline(
        parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.1), schedule=schedule
    )


@pytest.fixture
def nothing_frozen(monkeypatch):
    """As if the suite had not set its own objects aside."""
    monkeypatch.setattr(process_memory, "_running", 0)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("schedule", ["serial", "staged"])
def test_objects_are_set_aside_while_schedules_run(schedule, nothing_frozen):
    batches = [clicks_batch(3, seed) for seed in range(2)]
    before = gc.get_freeze_count()  # newer Pythons start with some
    assert before < 10_000
    first, second = (pipeline(schedule).run(batches) for _ in range(2))
    next(first), next(second)
    assert gc.get_freeze_count() > 10_000
    list(first)
    assert gc.get_freeze_count() > 10_000  # the second still runs
    list(second)
    assert gc.get_freeze_count() <= before
