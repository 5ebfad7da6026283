"""The schedule of a single rank against the serial one: tables, row state, dense weights and every
loss, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import interpreter, single_cases
from helpers.collisions import batch_of, build, colliding, state_of

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.pipeline.serial import Serial
from freescale.pipeline.single import SerialSingle, Single
from freescale.pipeline.staged import Staged
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport

STREAM = colliding(0.3, steps=6)


def batches_of(stream=STREAM):
    return [batch_of(ids, number) for number, ids in enumerate(stream)]


def train(schedule, stream=STREAM, **options):
    parallel, pipeline = build(LocalTransport(), schedule, **options)
    losses = [(result.loss, dict(result.losses)) for result in pipeline.run(batches_of(stream))]
    return losses, state_of(parallel)


def assert_same(actual, expected):
    assert actual[0] == expected[0] and len(expected[0]) > 0
    pairs = ((name, actual[1][name], value) for name, value in expected[1].items())
    assert [name for name, ours, value in pairs if not torch.equal(ours, value)] == []


OPTIONS = {
    **{name: {"optimizer": name} for name in ROW_OPTIMIZERS},
    "accumulation and clip": {"accumulate": 3, "clip": 0.5},
    "mixed placement": {
        "placement": {"item": "sharded", "action": "replicated"},
        "optimizer": "rowwise_adagrad",
    },
    "all replicated": {"placement": "replicated", "optimizer": "adam"},
    "learning-rate schedule": {"learning_rate": lambda step: 1 / (1 + step % 3)},
    "balancer": {"balance": Balancer(PARTITIONERS["greedy"], CostModel.balanced_at(5))},
    "rounded": {"wire": torch.bfloat16},
    "task weights": {"task_weights": {"like": 0.25}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bit_equal_to_serial(name):
    assert_same(train("staged", **OPTIONS[name]), train("serial", **OPTIONS[name]))


def test_batches_of_one_sample_or_none():
    ones = [ids[:1] if step % 3 else [] for step, ids in enumerate(STREAM)]
    ones[0] = [7]
    assert_same(train("staged", ones, optimizer="adam"), train("serial", ones, optimizer="adam"))


@pytest.mark.parametrize("padded", [False, True], ids=["as they are", "padded"])
def test_schedules_of_one_rank_by_their_names(padded, monkeypatch):
    monkeypatch.setattr("freescale.pipeline.pipeline.pads_products", lambda *_: padded)
    oracle = SerialSingle if padded else Serial
    for schedule, kind in (("staged", Single), ("serial", oracle), (Staged, Staged)):
        _, pipeline = build(LocalTransport(), schedule)
        assert type(pipeline.schedule) is kind
        pipeline.close()


def test_the_oracle_of_padded_batches_is_serial():
    assert_same(train(SerialSingle, optimizer="adam"), train(Serial, optimizer="adam"))


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(single_cases.__file__)


@pytest.mark.parametrize("case", single_cases.CASES)
def test_bit_equal_to_serial_with_the_kernels_of_a_gpu(interpreted, case):
    assert interpreted[case] == []


def test_checkpoint_evaluation_and_resume_in_the_middle(tmp_path):
    """Reading and saving between two steps changes nothing, and a new pipeline goes on."""
    expected = train("serial", optimizer="adam")
    parallel, pipeline = build(LocalTransport(), "staged", optimizer="adam")
    checkpoints, losses = Checkpoints(tmp_path, LocalTransport()), []
    batches = batches_of()
    for result in pipeline.run(batches):
        losses.append((result.loss, dict(result.losses)))
        pipeline.flush()
        with parallel.reading(batches[0]) as batch, torch.no_grad():
            parallel(batch)
        if result.step == 3:
            progress = {"step": 3, "pipeline": pipeline.state_dict()}
            checkpoints.save(parallel, pipeline.optimizer, progress)
            break
    parallel, pipeline = build(LocalTransport(), "staged", optimizer="adam")
    progress = checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer)
    pipeline.load_state_dict(progress["pipeline"])
    losses += [(r.loss, dict(r.losses)) for r in pipeline.run(batches[3:])]
    assert_same((losses, state_of(parallel)), expected)


def test_stop_and_the_rest_of_the_data():
    """What was not trained is the first of the next run over the same iterator."""
    parallel, pipeline = build(LocalTransport(), "staged")
    losses, source = [], iter(batches_of())
    for result in pipeline.run(source):
        losses.append((result.loss, dict(result.losses)))
        if result.step == 2:
            pipeline.stop()
    assert pipeline.stopped and 2 <= pipeline.steps <= 5
    for result in pipeline.run(source):
        losses.append((result.loss, dict(result.losses)))
        if result.step == 4:
            break
    assert not pipeline.stopped
    losses += [(r.loss, dict(r.losses)) for r in pipeline.run(source)]
    assert_same((losses, state_of(parallel)), train("serial"))


def test_data_that_fails_is_raised_after_the_steps_before_it():
    def data():
        yield from batches_of()[:3]
        raise OSError("the disk is gone")

    _, pipeline = build(LocalTransport(), "staged")
    with pytest.raises(OSError, match="the disk is gone"):
        list(pipeline.run(data()))
    assert pipeline.steps == 3
    bad = [*batches_of()[:2], batch_of([1, 10**6], 2)]
    _, pipeline = build(LocalTransport(), "staged")
    with pytest.raises(ValueError, match="has rows 0 to"):
        list(pipeline.run(bad))
    assert pipeline.steps == 2


def test_mistakes_are_refused_as_by_the_serial_schedule():
    for schedule in ("serial", "staged"):
        _, pipeline = build(LocalTransport(), schedule, task_weights={"buy": 1.0})
        with pytest.raises(ValueError, match="task_weights names buy"):
            list(pipeline.run(batches_of()))
        bare = replace(batches_of()[1], weights={})
        _, pipeline = build(LocalTransport(), schedule)
        with pytest.raises(ValueError, match="the batch has no weights"):
            list(pipeline.run([batches_of()[0], bare]))
        assert pipeline.steps == 1


def test_nothing_is_exchanged():
    """No collective, and no read of sizes by the transport."""
    parallel, pipeline = build(LocalTransport(), "staged")
    list(pipeline.run(batches_of()))
    for record in pipeline.ledger.drain():
        assert record["collectives"] == []
        assert record["counters"]["samples"] > 0
        assert {"forward", "backward", "optimizer"} <= {span[0] for span in record["spans"]}
