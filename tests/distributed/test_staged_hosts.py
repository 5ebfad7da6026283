"""The staged schedule between CPUs of several machines, where lane `input` asks for rows a step
earlier than lane `ahead` does within a machine."""

from __future__ import annotations

import pytest
import torch
from helpers.collisions import batch_of, build, colliding, share_of, state_of, train
from helpers.ranks import run_ranks

from freescale.embedding.optimizers import ROW_OPTIMIZERS


def _compare(transport, optimizer):
    """What is not bit-equal to the serial schedule."""
    transport.machines = range(transport.world)
    stream = colliding(0.4, steps=12)
    losses, expected = train(transport, "serial", stream, optimizer=optimizer)
    actual_losses, actual = train(transport, "staged", stream, optimizer=optimizer)
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    return different + ["losses"] * (actual_losses != losses)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_bit_equal_to_serial(ranks, optimizer):
    assert run_ranks(ranks, _compare, optimizer) == [[]] * ranks


def _run_twice(transport, schedule):
    """Two runs of one pipeline: in the second one the tables have their place from the start."""
    transport.machines = range(transport.world)
    parallel, pipeline = build(transport, schedule)
    losses = []
    for begin in (0, 5):
        batches = [
            share_of(batch_of(ids, begin + number), transport)
            for number, ids in enumerate(colliding(0.4, steps=5))
        ]
        losses += [result.loss for result in pipeline.run(batches)]
    return losses, state_of(parallel)


def test_runs_follow_each_other():
    for (losses, state), (expected_losses, expected) in zip(
        run_ranks(2, _run_twice, "staged"), run_ranks(2, _run_twice, "serial"), strict=True
    ):
        assert losses == expected_losses
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def _list_lanes(transport, nearby):
    """Lanes that asked for rows, of each step but the first two, whose tables had no place."""
    transport.machines = [0] * transport.world if nearby else range(transport.world)
    _, pipeline = build(transport, "staged")
    batches = (
        share_of(batch_of(ids, number), transport)
        for number, ids in enumerate(colliding(0.3, steps=8))
    )
    for _ in pipeline.run(batches):
        pass
    steps = pipeline.ledger.drain()[2:-2]  # what the last ones would ask for is not there
    return [{name for name, *_ in step["spans"] if name.endswith("deduplicate")} for step in steps]


@pytest.mark.parametrize(("nearby", "lane"), [(True, "ahead"), (False, "input")])
def test_ids_go_early_between_machines_only(nearby, lane):
    for steps in run_ranks(2, _list_lanes, nearby):
        assert steps and all(names == {f"{lane}/deduplicate"} for names in steps)
