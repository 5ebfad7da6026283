"""Training on dynamic tables: staged equals serial to the bit at every moment, with admission and
eviction in every step; and a table that never evicts equals a static one."""

from __future__ import annotations

import pytest
import torch
from helpers.collisions import batch_of, bits
from helpers.dynamic_streams import CHURN, RULES, build, state_of

import freescale
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.pipeline.gc_freeze import freeze_objects
from freescale.pipeline.staged import Staged
from freescale.transport.local import LocalTransport


@pytest.fixture(scope="module", autouse=True)
def objects_of_the_suite_stay_frozen():
    with freeze_objects():
        yield


def batches_of(stream):
    return [batch_of(ids, number) for number, ids in enumerate(stream)]


def train(schedule, rules, stream=CHURN, **options):
    parallel, pipeline = build(LocalTransport(), schedule, rules, **options)
    losses = [result.loss for result in pipeline.run(batches_of(stream))]
    pipeline.close()
    return losses, state_of(parallel)


def assert_same(actual, expected):
    assert actual[0] == expected[0] and len(expected[0]) > 0
    assert actual[1].keys() == expected[1].keys()
    differ = [n for n, value in expected[1].items() if not torch.equal(actual[1][n], value)]
    assert differ == []


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_staged_is_serial_to_the_bit(rules):
    expected = train("serial", rules)
    for schedule in (Staged, "staged"):
        assert_same(train(schedule, rules), expected)


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_a_table_that_never_evicts_is_a_static_one(optimizer):
    stream = [[i % 190 for i in ids] for ids in CHURN]
    rules = freescale.Dynamic(190 * 40)
    for schedule in ("serial", Staged, "staged"):
        losses, state = train(schedule, rules, stream, optimizer=optimizer)
        static, pipeline = build(LocalTransport(), schedule, None, optimizer=optimizer)
        assert losses == [result.loss for result in pipeline.run(batches_of(stream))]
        pipeline.close()
        rows = static.tables.get_group("item").rows
        seen = sorted({id for ids in stream for id in ids})
        assert state["item/ids"].tolist() == seen
        place = {id: at for at, id in enumerate(rows.get_ids("item").tolist())}
        order = torch.tensor([place[id] for id in seen])
        for part, value in rows.get_tensors("item").items():
            assert torch.equal(state[f"item/{part}"], bits(value[order])), part
        for name, value in static.module.named_parameters():
            assert torch.equal(state[name], bits(value)), name
