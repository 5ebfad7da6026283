"""What happens around a loop that is left, fails, is rolled back or handed to another pipeline:
staged does what serial does."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.collisions import (
    StagedAsOnGpus,
    batch_of,
    build,
    colliding,
    share_of,
    state_of,
)
from helpers.ranks import gather_ranks, run_ranks
from helpers.toys import Clicks
from helpers.wires import wired
from torch import nn

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.ledger.ledger import Ledger
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.failures import RemoteError
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport

SCHEDULES = ("serial", "staged", StagedAsOnGpus)


def stream(transport, steps=12, seed=0):
    return [
        share_of(batch_of(ids, number), transport)
        for number, ids in enumerate(colliding(0.4, steps=steps, seed=seed))
    ]


def balanced():
    return {"balance": Balancer(PARTITIONERS["greedy"], CostModel.balanced_at(5))}


def same(left, right):
    return [name for name, value in left.items() if not torch.equal(value, right[name])]


# ---- rolled back


def _rolled_back(transport, folder, schedule, inside):
    """Back to the checkpoint of step 3 after step 6; inside the loop the data goes on, outside it
    begins with other batches."""
    parallel, pipeline = build(transport, schedule, "adam")
    checkpoints = Checkpoints(Path(folder) / f"{schedule}-{inside}", transport)
    losses, saved = [], None
    for result in pipeline.run(stream(transport)):
        losses.append(result.loss)
        if len(losses) == 3:
            saved = checkpoints.save(
                parallel, pipeline.optimizer, {"step": 3, "pipeline": pipeline.state_dict()}
            )
        if len(losses) == 6:
            if not inside:
                break
            pipeline.load_state_dict(
                checkpoints.load(saved, parallel, pipeline.optimizer)["pipeline"]
            )
    restored = {}
    if not inside:
        pipeline.load_state_dict(checkpoints.load(saved, parallel, pipeline.optimizer)["pipeline"])
        restored = state_of(parallel)
        losses += [result.loss for result in pipeline.run(stream(transport, seed=7))]
    return losses, restored, state_of(parallel)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_a_rollback_is_exact(world, inside, tmp_path):
    expected, *others = (
        run_ranks(world, _rolled_back, str(tmp_path), schedule, inside) for schedule in SCHEDULES
    )
    for actual in others:
        for (losses, restored, end), (staged_losses, staged_restored, staged_end) in zip(
            expected, actual, strict=True
        ):
            assert same(restored, staged_restored) == same(end, staged_end) == []
            assert losses == staged_losses


# ---- another pipeline


def _handed_over(transport, schedule, second):
    """The first pipeline is left with something deferred; another goes on, then the first again."""
    parallel, first = build(transport, schedule, "adam")
    batches = iter(stream(transport))
    losses = []
    for result in first.run(batches):
        losses.append(result.loss)
        if result.step == 4:
            break
    other = freescale.Pipeline(parallel, first.optimizer, schedule=second, accumulate=2)
    other.load_state_dict(first.state_dict())
    for result in other.run(batches):
        losses.append(result.loss)
        if result.step == 8:
            break
    first.load_state_dict(other.state_dict())
    losses += [result.loss for result in first.run(batches)]
    return losses, state_of(parallel)


@pytest.mark.parametrize("world", [1, 2])
def test_another_pipeline_takes_over(world):
    cases = [("serial", "serial"), ("staged", "staged"), ("staged", "serial")]
    cases.append((StagedAsOnGpus, StagedAsOnGpus))
    expected, *others = (run_ranks(world, _handed_over, *case) for case in cases)
    for actual in others:
        for (losses, state), (actual_losses, actual_state) in zip(expected, actual, strict=True):
            assert len(losses) == 12 and losses == actual_losses and same(state, actual_state) == []


# ---- batches that were taken


def _left_and_gone_on(transport, schedule, options):
    parallel, pipeline = build(transport, schedule, "adam", **(balanced() if options else {}))
    batches, numbers = iter(stream(transport)), []
    for leave in (4, 5, None):
        for result in pipeline.run(batches):
            numbers.append(result.batch_number)
            if result.step == leave:
                break
    return numbers, state_of(parallel)


@pytest.mark.parametrize(("world", "options"), [(1, False), (2, False), (2, True)])
def test_batches_that_were_taken_belong_to_the_next_run(world, options):
    expected, *others = (
        run_ranks(world, _left_and_gone_on, schedule, options) for schedule in SCHEDULES
    )
    for actual in others:
        for (numbers, state), (staged_numbers, staged_state) in zip(expected, actual, strict=True):
            assert numbers == staged_numbers == list(range(12)) and same(state, staged_state) == []


def _data_fails(transport, schedule):
    parallel, pipeline = build(transport, schedule, "adam")
    batches, steps = stream(transport), 0

    def data():
        yield from batches[:6]
        if transport.rank == transport.world - 1:
            raise OSError("the disk is gone")
        yield from batches[6:]

    with pytest.raises((OSError, RemoteError), match="the disk is gone"):
        for _ in pipeline.run(data()):
            steps += 1
    return steps, state_of(parallel)


@pytest.mark.parametrize("world", [1, 2])
def test_every_step_before_a_failure_of_the_data_is_made(world):
    expected, *others = (run_ranks(world, _data_fails, schedule) for schedule in SCHEDULES)
    for actual in others:
        for (steps, state), (staged_steps, staged_state) in zip(expected, actual, strict=True):
            assert steps == staged_steps == 6 and same(state, staged_state) == []


def test_an_iterator_may_fill_its_buffers_again():
    def losses(schedule):
        _, pipeline = build(LocalTransport(), schedule)
        whole = stream(LocalTransport())
        buffers = [tensor.clone() for tensor in whole[0].tensors()]

        def data():
            for batch in whole:
                for buffer, tensor in zip(buffers, batch.tensors(), strict=True):
                    buffer.copy_(tensor)
                yield batch.with_tensors(buffers)

        return [result.loss for result in pipeline.run(data())]

    assert losses("staged") == losses("serial")


# ---- ranks that leave


def _one_leaves(transport, schedule, options):
    _, pipeline = build(transport, schedule, **(balanced() if options else {}))
    for result in pipeline.run(stream(transport)):
        if transport.rank == 0 and result.step == 5:
            return


@pytest.mark.parametrize(
    ("schedule", "options"),
    [(schedule, options) for schedule in SCHEDULES for options in (False, True)],
)
def test_a_rank_that_leaves_alone_says_so(schedule, options):
    """The transport's own limit is half of the test's: who waited for it would not be in time."""
    (left, _), *others = gather_ranks(3, _one_leaves, schedule, options, timeout=60)
    assert left is None
    for error, _ in others:
        assert error is not None and "rank 0 left the loop at step 5" in error


def _one_leaves_at_the_end(transport, schedule):
    _, pipeline = build(transport, schedule)
    for result in pipeline.run(stream(transport, steps=4)):
        if transport.rank == 1 and result.step == 4:
            return


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_that_leaves_after_the_last_step_says_so(schedule):
    (error, _), (left, _) = gather_ranks(2, _one_leaves_at_the_end, schedule, timeout=60)
    assert left is None and error is not None and "rank 1 left the loop at step 4" in error


def _stopped(transport, schedule, options):
    parallel, pipeline = build(transport, schedule, "adam", **(balanced() if options else {}))
    batches, steps = iter(stream(transport)), []
    for result in pipeline.run(batches):
        steps.append(result.step)
        if transport.rank == transport.world - 1 and result.step == 5:
            pipeline.stop()
    at, stopped = pipeline.steps, pipeline.stopped
    steps += [result.step for result in pipeline.run(batches)]
    return at, stopped, pipeline.stopped, steps, state_of(parallel)


@pytest.mark.parametrize(("world", "options"), [(1, False), (2, False), (2, True)])
def test_stop_ends_the_run_on_all_ranks(world, options):
    """And nothing is lost: the next run over the same iterator has the other steps."""
    for schedule in SCHEDULES:
        whole = run_ranks(world, _left_and_gone_on, "serial", options)
        found = run_ranks(world, _stopped, schedule, options)
        assert len({at for at, *_ in found}) == 1 and 5 <= found[0][0] <= 8
        for (_, stopped, later, steps, state), (_, expected) in zip(found, whole, strict=True):
            assert (
                stopped
                and not later
                and steps == list(range(1, 13))
                and same(state, expected) == []
            )


# ---- a backward that fails


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail:
            raise RuntimeError("out of memory, once")
        return gradient, None


class Sometimes(Clicks):
    """Its backward fails in the batch of that number, half-way through its parameters."""

    bad = 3

    def forward(self, batch):
        first, tanh, last = self.layers
        self.layers.forward = lambda x: last(
            _Failing.apply(tanh(first(x)), batch.number == self.bad)
        )
        return super().forward(batch)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_after_a_backward_that_failed(schedule, accumulate):
    """In another pipeline, and in the same one; the batch that failed is left out."""
    torch.manual_seed(0)
    parallel, pipeline = build(LocalTransport(), schedule, model=lambda: Sometimes(items=6000))
    batches = iter(stream(LocalTransport()))
    with pytest.raises(RuntimeError, match="out of memory, once"):
        list(pipeline.run(batches))
    other = freescale.Pipeline(
        parallel, pipeline.optimizer, schedule=schedule, accumulate=accumulate
    )
    numbers = []
    for result in other.run(batches):
        numbers.append(result.batch_number)
        if result.batch_number == 6:
            break
    assert numbers + [result.batch_number for result in pipeline.run(batches)] == list(range(4, 12))
    expected = build(LocalTransport(), "serial", model=lambda: Clicks(items=6000))
    left = [batch for batch in stream(LocalTransport()) if batch.number != 3]
    list(expected[1].run(left[:3]))
    second = freescale.Pipeline(
        expected[0], expected[1].optimizer, schedule="serial", accumulate=accumulate
    )
    list(second.run(left[3:6]))
    list(expected[1].run(left[6:]))
    assert same(state_of(expected[0]), state_of(parallel)) == []


# ---- what a pipeline holds


def test_a_closed_pipeline_is_settled_and_refuses_to_run():
    parallel, pipeline = build(LocalTransport(), "staged")
    with pipeline:
        for result in pipeline.run(stream(LocalTransport())):
            if result.step == 4:
                break
    expected, serial = build(LocalTransport(), "serial")
    list(serial.run(stream(LocalTransport())[:4]))
    assert same(state_of(expected), state_of(parallel)) == []
    with pytest.raises(RuntimeError, match="closed"):
        next(pipeline.run(stream(LocalTransport())))


def _sweep(transport, wire):
    """Descriptors, threads and mapped memory of this process, after each of five pipelines."""
    if wire is not None:
        kind, shared = wired(wire)
        options = {"shared": shared, "timeout": timedelta(seconds=30)}
        transport = HostwireTransport(
            "cpu", Ledger(), transport.group, transport.control, kind, **options
        )
    found = []
    for _ in range(5):
        _, pipeline = build(transport, "staged", dense_sums="partitioned")
        with pipeline:
            list(pipeline.run(stream(transport, steps=3)))
        rings = sum(
            1
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:freescale" in line
        )
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count(), rings))
    return found


@pytest.mark.parametrize("wire", [None, "shared memory", "tcp"])
def test_pipelines_one_after_another_take_what_one_does(wire):
    for found in run_ranks(2, _sweep, wire, timeout=60):
        assert found[1:] == [found[0]] * 4


# ---- learning rates, and what is refused


def test_a_scheduler_of_torch_works():
    """The learning rate is the optimizer's own unless `learning_rate` is given; groups may be added
    on the way."""
    used = []

    def train(**options):
        used.clear()
        _, pipeline = build(LocalTransport(), "staged", **options)
        optimizer = pipeline.optimizer
        optimizer.register_step_pre_hook(
            lambda *_: used.append([group["lr"] for group in optimizer.param_groups])
        )
        return pipeline, optimizer

    pipeline, optimizer = train()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in pipeline.run(stream(LocalTransport(), steps=4)):
        scheduler.step()
    assert used == [[1e-2], [5e-3], [2.5e-3], [1.25e-3]]

    pipeline, optimizer = train(learning_rate=lambda step: 2.0**-step)
    late = optimizer.param_groups[0]["params"].pop()
    for result in pipeline.run(stream(LocalTransport(), steps=4)):
        if result.step == 2:
            optimizer.add_param_group({"params": [late], "lr": 0.1})
    assert used == [[5e-3], [2.5e-3], [1.25e-3, 0.0125], [6.25e-4, 6.25e-3]]


def test_an_optimizer_of_another_model_is_refused():
    parallel, _ = build(LocalTransport(), "staged")
    with pytest.raises(
        ValueError,
        match=(
            r"2 of the optimizer's 2 parameters are not the model's "
            r"\(shapes \(3, 8\), \(3,\)\)"
        ),
    ):
        freescale.Pipeline(parallel, torch.optim.SGD(nn.Linear(8, 3).parameters(), lr=0.1))


def _unknown_task(transport):
    _, pipeline = build(transport, "staged", task_weights={"clicks": 2.0})
    list(pipeline.run(stream(transport)))


def test_the_weight_of_a_task_that_is_none_is_refused():
    for error, _ in gather_ranks(2, _unknown_task, timeout=60):
        assert error is not None and "task_weights names clicks; the tasks are click, like" in error


def _diverging(transport, schedule):
    _, pipeline = build(transport, schedule)
    for result in pipeline.run(stream(transport)):
        if result.step == 3 and transport.rank == 0:
            with torch.no_grad():
                next(pipeline.model.dense_parameters()).fill_(float("nan"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_is_not_finite_ends_the_run_everywhere(schedule):
    for error, _ in gather_ranks(2, _diverging, schedule, timeout=60):
        assert error is not None and "the loss is nan at step 4: lower the learning rates" in error
