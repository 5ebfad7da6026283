"""Dynamic tables on several ranks: the decisions of one rank, its numbers to 1e-12, staged equal to
serial to the bit, with balancing; and checkpoints that another number of ranks takes up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.collisions import StagedAsOnGpus, batch_of, in_pieces, share_of
from helpers.dynamic_oracle import FineDynamic
from helpers.dynamic_streams import CHURN, RULES, build, list_local_rows
from helpers.ranks import run_ranks

from freescale.embedding.dynamic_rules import Dynamic, Seen
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport

RULE = RULES[2]  # counts, evicts and turns away
FEATURES = Seen(2), "lru", ("negatives",), "history", "learned"


@dataclass(frozen=True)
class TwoShards(Dynamic):
    shards = 2


def _train(transport, schedule, rules, folder=None, saved=()):
    """(losses, what this rank's rows hold, dense weights)."""
    options = {"optimizer": "adam", "balance": "greedy", "exchange": "two-level"}
    parallel, pipeline = build(transport, schedule, rules, **options)
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(folder, transport, keep=99, full_every=2, asynchronous=True)
    batches = [share_of(batch_of(ids, number), transport) for number, ids in enumerate(CHURN)]
    losses = []
    for result in pipeline.run(batches):
        losses.append(result.loss)
        if checkpoints is not None and result.step in saved:
            progress = {"step": result.step, "pipeline": pipeline.state_dict()}
            checkpoints.save(parallel, pipeline.optimizer, progress)
    if checkpoints is not None:
        checkpoints.wait()
    pipeline.close()
    dense = torch.cat([value.detach().reshape(-1) for value in parallel.module.parameters()])
    return losses, *list_local_rows(parallel), dense


def _both(transport, folder, machines=None):
    in_pieces()
    if machines is not None:
        transport.machines = machines
    return (
        _train(transport, "serial", RULE),
        _train(transport, "staged", RULE, folder, (4, 7, 8)),
        _train(transport, StagedAsOnGpus, RULE),
    )


def _resume(transport, rules, folder):
    parallel, pipeline = build(transport, "serial", rules, optimizer="adam", balance="greedy")
    checkpoints = Checkpoints(folder, transport)
    progress = checkpoints.load(checkpoints.path(7), parallel, pipeline.optimizer)
    pipeline.load_state_dict(progress["pipeline"])
    batches = [share_of(batch_of(ids, number), transport) for number, ids in enumerate(CHURN)]
    losses = [result.loss for result in pipeline.run(batches[7:])]
    return losses, *list_local_rows(parallel)


def _join(parts):
    """ids [n] of all ranks, ascending, and what their rows hold."""
    ids, held = torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])
    order = ids.argsort()
    return ids[order], held[order]


def _assert_close(losses, parts, alone):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone[0]), rtol=1e-12, atol=1e-14)
    (ids, held), (expected_ids, expected) = _join(parts), _join([alone])
    assert torch.equal(ids, expected_ids)
    # position, count and last use (the first columns are integers), then values
    torch.testing.assert_close(held, expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(held[:, :3], expected[:, :3])


def check_ranks(world, other, folder, machines=None):
    alone = _train(LocalTransport(), "serial", RULE)
    pairs = run_ranks(world, _both, str(folder), machines)
    for serial, *others in pairs:
        for staged in others:
            assert serial[0] == staged[0]
            assert all(torch.equal(a, b) for a, b in zip(serial[1:], staged[1:], strict=True))
    _assert_close(pairs[0][0][0], [serial for serial, *_ in pairs], alone)
    resumed = run_ranks(other, _resume, RULE, str(folder))
    _assert_close(alone[0][:7] + resumed[0][0], resumed, alone)


def test_three_ranks_decide_as_one_and_two_go_on(tmp_path):
    check_ranks(3, 2, tmp_path)


def test_two_machines_of_two_ranks_decide_as_one(tmp_path):
    """In two levels: the leaders merge what the ranks count and draw. The checkpoint goes on."""
    check_ranks(4, 1, tmp_path, [0, 0, 1, 1])


def test_a_rank_may_own_no_shard(tmp_path):
    """The last of three has none of two shards; it saves and resumes with the others."""
    rules = TwoShards(4096, *FEATURES)
    alone = _train(LocalTransport(), "serial", rules)
    parts = run_ranks(3, _train, "staged", rules, str(tmp_path), (4, 7))
    assert [len(part[1]) > 0 for part in parts] == [True, True, False]
    _assert_close(parts[0][0], parts, alone)
    resumed = run_ranks(3, _resume, rules, str(tmp_path))
    _assert_close(alone[0][:7] + resumed[0][0], resumed, alone)


def test_another_number_of_shards_is_refused(tmp_path):
    fine, rules = (kind(4096 * 50, *FEATURES) for kind in (FineDynamic, Dynamic))
    _train(LocalTransport(), "serial", fine, str(tmp_path), (4, 7))
    with pytest.raises(ValueError, match="Size mismatch .* for table/item"):
        _resume(LocalTransport(), rules, str(tmp_path))
