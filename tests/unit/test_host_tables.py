"""Tables whose home is host memory or a disk: the same bits as tables on the device, by every
schedule and row optimizer, with caches so small that every step evicts."""

from __future__ import annotations

import pytest
import torch
from helpers.collisions import ITEMS, batch_of, build, colliding, state_of

from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.tiers import Disk, Host
from freescale.pipeline.gc_freeze import freeze_objects
from freescale.pipeline.staged import Staged
from freescale.transport.local import LocalTransport

STREAM = colliding(0.3, steps=8)
# Rows that skip a batch or several, and come back: out of the cache, and after it was written back.
RETURNING = [[(i + 40 * (step % 5)) % 200 for i in range(40)] for step in range(12)]
WIDTH = 8  # bytes of a value
LEAST = 120  # rows: three batches of at most 40


@pytest.fixture(scope="module", autouse=True)
def objects_of_the_suite_stay_frozen():
    with freeze_objects():
        yield


def bytes_of(rows, optimizer="adagrad", width=4):
    shapes = ROW_OPTIMIZERS[optimizer]().state_shapes(width).values()
    return rows * WIDTH * (width + sum(torch.Size(shape).numel() for shape in shapes))


def batches_of(stream):
    return [batch_of(ids, number) for number, ids in enumerate(stream)]


def train(schedule, stream=STREAM, **options):
    parallel, pipeline = build(LocalTransport(), schedule, **options)
    losses = [result.loss for result in pipeline.run(batches_of(stream))]
    return losses, state_of(parallel)


def assert_same(actual, expected):
    assert actual[0] == expected[0] and len(expected[0]) > 0
    pairs = ((name, actual[1][name], value) for name, value in expected[1].items())
    assert [name for name, ours, value in pairs if not torch.equal(ours, value)] == []


def item_width():
    parallel, _ = build(LocalTransport(), "serial")
    return parallel.tables.specs["item"].width


def place(rows, optimizer="adagrad", folder=None):
    cache = bytes_of(rows, optimizer, item_width())
    tier = Host(cache) if folder is None else Disk(str(folder), cache)
    return {"item": tier, "action": "sharded"}


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_bit_equal_to_tables_on_the_device(optimizer, tmp_path):
    for stream in (STREAM, RETURNING):
        expected = train("serial", stream, optimizer=optimizer)
        for schedule, rows, folder in (
            ("serial", LEAST, None),
            (Staged, LEAST, None),
            ("staged", 150, None),  # of one rank: single.py
            (Staged, 200, tmp_path),
            ("staged", ITEMS, tmp_path),
        ):
            placement = place(rows, optimizer, folder)
            found = train(schedule, stream, optimizer=optimizer, placement=placement)
            assert_same(found, expected)
    assert list(tmp_path.iterdir()) == []  # the files have no names
