"""Ids without a row that read a learned one: it is trained as an ordinary row of a reserved id."""

from __future__ import annotations

import pytest
import torch
from helpers.collisions import batch_of
from helpers.dynamic_streams import CHURN, RULES, build, state_of
from safetensors.torch import load_file

import freescale
from freescale.embedding.dynamic_rules import DEFAULT_ID, Dynamic, Seen, parse_dynamic
from freescale.embedding.request import Index
from freescale.pipeline.staged import Staged
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport

ALONE = LocalTransport()
NEVER = Dynamic(4096, Seen(99), default="learned")


def train(schedule, rules, stream, **options):
    parallel, pipeline = build(ALONE, schedule, rules, **options)
    losses = [result.loss for result in pipeline.run(stream)]
    pipeline.close()
    return losses, parallel


def read(parallel, ids):
    with parallel.reading(batch_of(ids, 0)) as batch:
        return parallel.module.item(batch.values("history")).clone()


@pytest.mark.parametrize("schedule", ["serial", Staged])
def test_ids_that_are_never_admitted_train_one_row(schedule):
    """As if all of them were the reserved id, in a table that admits it."""
    stream = [batch_of(ids, number) for number, ids in enumerate(CHURN)]
    same = [batch_of([DEFAULT_ID] * len(ids), number) for number, ids in enumerate(CHURN)]
    for batch, one in zip(stream, same):  # their actions differ
        one.sequences["actions"].values.copy_(batch.sequences["actions"].values)
    losses, parallel = train(schedule, NEVER, stream, optimizer="adam")
    expected, other = train(schedule, Dynamic(4096), same, optimizer="adam")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-12, atol=0)
    found, one = read(parallel, CHURN[0]), read(other, [DEFAULT_ID])
    torch.testing.assert_close(found, one.expand_as(found), rtol=1e-12, atol=1e-14)
    assert state_of(parallel)["item/ids"].tolist() == [DEFAULT_ID]


def test_only_ids_without_a_row_read_it(tmp_path):
    stream = [batch_of(ids, number) for number, ids in enumerate(CHURN)]
    parallel, pipeline = build(ALONE, "staged", RULES[2], optimizer="adam")
    checkpoints = Checkpoints(tmp_path / "checkpoints", ALONE)
    before = read(parallel, [1234567])  # nothing is there before the first batch
    assert not before.any()
    list(pipeline.run(stream))
    path = checkpoints.save(parallel, pipeline.optimizer, {"step": len(stream)})
    state = state_of(parallel)
    held = state["item/ids"].tolist()
    absent = [id for ids in CHURN for id in ids if id not in held]
    assert absent and DEFAULT_ID in held
    default, *_ = rows = read(parallel, [1234567, *absent])
    assert default.any() and all(torch.equal(row, default) for row in rows)
    others = [id for id in held if id != DEFAULT_ID]
    assert not any(torch.equal(row, default) for row in read(parallel, others))
    # It is no item: neither ranked nor among the ids of an export.
    ids, local = parallel.tables.get_local_rows("item")
    assert sorted(ids.tolist()) == sorted(others) and len(local) == len(others)
    freescale.export(path, tmp_path / "out")
    table = load_file(tmp_path / "out" / "table.item.safetensors")
    assert table["ids"].tolist() == sorted(others) and len(table["weight"]) == len(others)
    assert torch.equal(table["default"][0], default)


def test_what_is_read_for_a_key_may_change():
    """When tables were replaced, ids have other rows."""
    ids = torch.tensor([5, 7, 5, 9])
    given = [(0, ids), (0, torch.tensor([DEFAULT_ID]))]
    keys = torch.tensor([1, 2, 3, 4])  # of 5, 7, 9 and the default
    index = Index(keys, given, torch.tensor([0, 1, 0, 2, 3]))
    whole = index
    index = whole.redirect(torch.tensor([True, False, False, False]))
    assert index.find_known(0, ids)[1].tolist() == [3, 1, 3, 2]
    assert [part.tolist() for part in index.search(torch.tensor([1, 2, 8]))] == [
        [3, 1, 3],
        [True, True, False],
    ]
    index = index.redirect(torch.tensor([False, True, False, False]))
    assert index.find_known(0, ids)[1].tolist() == [0, 3, 0, 2]
    assert index.find_own(0, ids, keys[:0]).tolist() == [0, 1, 0, 2]
    assert index.find_own(0, torch.tensor([7, 9]), keys[1:3]).tolist() == [1, 2]
    assert whole.find_known(0, ids)[1].tolist() == [0, 1, 0, 2]


def test_the_option():
    rules = parse_dynamic("dynamic:4096:seen=3:default=learned")
    assert rules == Dynamic("4096", Seen(3), default="learned")
    assert rules.describe() != Dynamic(4096, Seen(3)).describe()
    assert "learned" in str(rules)
    with pytest.raises(ValueError, match="'zeros' or 'learned'"):
        Dynamic(1, default="mean")
