"""Histories divided over ranks against whole ones: losses, weights and tables."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
import torch
from helpers.divided_cases import make_batch, train_alone, train_divided
from helpers.ranks import gather_ranks, run_ranks

from freescale.embedding.dynamic_rules import Dynamic, Seen
from freescale.embedding.host_tables.tiers import Host
from freescale.ledger.merge import merge_step
from freescale.models.hstu_layer import HSTULayer
from freescale.models.sequence_head import SequenceHead
from freescale.pipeline import staged as schedule_module
from freescale.transport.connect import connect

LENGTHS = [90, 5, 7, 3, 11, 2, 40, 6]
CASES = {
    "retrieval": {"task": "retrieval"},
    "ranking": {"task": "ranking"},
    "features": {"task": "ranking", "features": True, "recompute": True},
    "micro-batches": {"task": "retrieval", "accumulate": 3, "schedule": "serial"},
    # few long users: some ranks have no part, and one nothing at all
    "one user": {"task": "ranking", "lengths": [70]},
    "two users": {"task": "retrieval", "lengths": [60, 8], "position_bias": False},
    "no time": {"task": "retrieval", "lengths": [60, 8], "time_bias": False, "recompute": True},
}


def _train(run, lengths=LENGTHS, **case):
    options = {name: case.get(name, False) for name in ("features",)}
    return run([make_batch(lengths, case["task"], 1, **options)], **case)


def _train_all(transport, wire, split):
    if wire is not None:
        transport = connect("cpu", transport=wire)
    return [
        _train(lambda *a, **k: train_divided(transport, *a, split=split, **k), **case)
        for case in CASES.values()
    ]


def assert_close(found, expected, message=""):
    losses, state, *_ = found
    assert losses == pytest.approx(expected[0], rel=1e-12), message
    for name, value in expected[1].items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{message} {n}: {m}"
        )


@pytest.fixture(scope="module")
def whole():
    return [_train(train_alone, **case) for case in CASES.values()]


@pytest.mark.parametrize(
    ("world", "wire", "split"), [(2, None, 3), (3, "hostwire-tcp", 2), (4, None, 4)]
)
def test_equals_whole_histories(whole, world, wire, split):
    ranks = run_ranks(world, _train_all, wire, split)
    for number, (name, expected) in enumerate(zip(CASES, whole, strict=True)):
        for found in ranks:
            assert_close(found[number], expected, f"{name}, {world} ranks:")
        parts = sum(found[number][2][0] for found in ranks)
        assert parts >= split, f"{name}: nothing was divided"
        figures = merge_step([found[number][3][0] for found in ranks])
        assert figures["split_parts"] == parts and figures["bytes"]["attention"] > 0


STEPS = ([90, 5, 7, 3, 11, 2, 40, 6], [3, 4, 5, 60, 2, 7], [70], [4, 4, 4, 5])
TABLES = {
    "on the device": {},
    "dynamic, behind a cache": {
        "tables": {"item": Dynamic(4096, Seen(2), "lru", ("negatives",), "targets")},
        "placement": {"item": Host(1 << 14), "action": "sharded"},
    },
}


def _train_steps(transport, schedule, **options):
    """Tables apart: the ones on the device are larger than the ids that come."""
    batches = [make_batch(lengths, "retrieval", seed) for seed, lengths in enumerate(STEPS)]
    return {
        name: train_divided(transport, batches, schedule=schedule, **options, **tables)
        for name, tables in TABLES.items()
    }


def _train_both(transport):
    return [_train_steps(transport, schedule, split=3) for schedule in ("serial", "staged")]


def test_staged_equals_serial_to_the_bit_with_all_tables():
    from freescale.transport.local import LocalTransport

    alone = _train_steps(LocalTransport(), "serial")
    ranks = run_ranks(3, _train_both)
    for name in TABLES:
        for serial, staged in ranks:
            assert serial[name][0] == staged[name][0]
            for part, value in serial[name][1].items():
                assert torch.equal(staged[name][1][part], value), (name, part)
        assert sum(sum(serial[name][2]) for serial, _ in ranks) > 8
        joined = dict(ranks[0][0][name][1])
        if "ids" in joined:
            states = [serial[name][1] for serial, _ in ranks]
            ids = torch.cat([state["ids"] for state in states])
            order = ids.argsort()
            joined["ids"] = ids[order]
            joined["held"] = torch.cat([state["held"] for state in states])[order]
            expected = alone[name][1]
            order = expected["ids"].argsort()
            expected |= {part: expected[part][order] for part in ("ids", "held")}
        assert_close((ranks[0][0][name][0], joined), alone[name], name)


def _train_saving(transport, folder):
    batches = [make_batch(lengths, "retrieval", seed) for seed, lengths in enumerate(STEPS)]
    return train_divided(transport, batches, split=3, save=(folder, 2))


def _resume(transport, folder):
    batches = [make_batch(lengths, "retrieval", seed) for seed, lengths in enumerate(STEPS)]
    return train_divided(transport, batches, split=2, resume=folder)


def test_another_number_of_ranks_resumes(tmp_path):
    saved = run_ranks(3, _train_saving, str(tmp_path))[0]
    for found in run_ranks(2, _resume, str(tmp_path)):
        assert found[2][0] > 0, "the first step after the checkpoint divides nothing"
        assert_close(found, (saved[0][2:], saved[1]))


class Broken(Exception):
    pass


def _fail(transport):
    plan = schedule_module.plan_stages  # as on GPUs: a batch is prepared after the forward
    schedule_module.plan_stages = lambda *inputs: replace(plan(*inputs), prepare_at_once=False)
    if transport.rank == 1:
        compute = HSTULayer.forward

        def forward(layer, *inputs, **options):
            if layer.number == 1 and inputs[-1] is not None:  # of parts
                raise Broken("a layer fails here")
            return compute(layer, *inputs, **options)

        HSTULayer.forward = forward
    # the next batches: its peers, which wait for its keys, do not prepare them
    batches = [make_batch(LENGTHS, "retrieval", seed) for seed in range(4)]
    try:
        train_divided(transport, batches, split=3)
    finally:
        transport.close()  # as a process that ends


def _ignore_parts(transport):
    encode = SequenceHead._encode

    def encode_whole(head, batch, *inputs, **options):
        return encode(head, replace(batch, divided=None), *inputs, **options)

    SequenceHead._encode = encode_whole
    train_divided(transport, [make_batch(LENGTHS, "retrieval", 1)], split=3)


def test_a_model_that_ignores_parts_is_refused():
    for error, _ in gather_ranks(2, _ignore_parts, timeout=60):
        assert error is not None and "does not read the parts of divided histories" in error


def test_a_rank_that_fails_in_a_layer_ends_all():
    begin = time.monotonic()
    results = gather_ranks(3, _fail, timeout=60)
    for rank, (error, _) in enumerate(results):
        wanted = "a layer fails here" if rank == 1 else "a rank died or fell silent"
        assert error is not None and re.search(wanted, error), error
    assert time.monotonic() - begin < 60
