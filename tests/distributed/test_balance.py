"""Balanced steps against unbalanced ones: same loss, gradients and tables; every sample in its
step, once; errors on all ranks."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.loading import load_histories
from helpers.ranks import gather_ranks, run_ranks
from helpers.training import build, snapshot

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.data.batches.loader import Histories
from freescale.data.synthetic.generate import generate
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.transport.local import LocalTransport

LABELS = ("is_click", "is_like")
COST = CostModel.balanced_at(20)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    generate(
        path,
        users=60,
        items=60,
        median=8,
        sigma=1.2,
        cap=60,
        global_batch=13,
        actions=True,
        labels=LABELS,
        seed=2,
    )
    return str(path)


def train(transport, path, task, numbers, partitioner, accumulate=2):
    """Steps on the given global batches, and the keys of the samples that this rank computed in
    each."""
    options = {
        "task": task,
        "tasks": LABELS if task == "ranking" else (),
        "count": 12,
        "in_batch_share": 0.5,
        "halo": 4,
    }
    data = load_histories(
        path,
        13,
        rank=transport.rank,
        world=transport.world,
        max_length=50,
        candidates=4,
        seed=3,
        **options,
    )
    torch.manual_seed(0)
    encoder = HSTU(
        width=8, layers=1, heads=2, max_length=54, dropout=0.3, position_bias=True, time_bias=True
    )
    sizes = {"num_items": data.num_items, "num_actions": data.num_actions, "table_device": "meta"}
    model = (
        Ranking(encoder, tasks=LABELS, **sizes)
        if task == "ranking"
        else Retrieval(encoder, **sizes)
    ).double()
    seen: list[list[int]] = []
    model.register_forward_pre_hook(lambda _, inputs: seen[-1].extend(inputs[0].keys.tolist()))
    parallel = freescale.parallelize(
        model,
        model.features,
        freescale.Adagrad(lr=0.1),
        transport=transport,
        placement="sharded",
        init_std=0.3,
    )
    parallel.tables.place()
    balancer = None if partitioner is None else Balancer(PARTITIONERS[partitioner], COST)
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    # The check of the first batch would call the model, and `seen` counts its calls.
    pipeline = freescale.Pipeline(
        parallel, optimizer, accumulate=accumulate, balance=balancer, check=False
    )
    losses = []
    seen.append([])
    for result in pipeline.run(data.batch(number) for number in numbers):
        losses.append((result.batch_number, result.loss))
        seen.append([])
    return losses, snapshot(parallel), seen[: len(numbers)]


BATCHES = (("retrieval", 0), ("ranking", 1), ("retrieval", 4))  # batch 4 has 8 samples only


@pytest.fixture(scope="module")
def unbalanced(path):
    return [train(LocalTransport(), path, task, [number], None) for task, number in BATCHES]


def _all_cases(transport, path):
    return {
        name: [train(transport, path, task, [number], name)[:2] for task, number in BATCHES]
        for name in PARTITIONERS
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_one_step_equals_the_unbalanced_one(path, unbalanced, world):
    """Dense gradients show in the weights after a step of SGD, row gradients in rows and Adagrad's
    sums."""
    for balanced in run_ranks(world, _all_cases, path):
        assert balanced.keys() == PARTITIONERS.keys()
        for name, found in balanced.items():
            for (losses, state), (expected_losses, expected, _) in zip(found, unbalanced):
                assert losses[0][1] == pytest.approx(expected_losses[0][1], rel=1e-12), name
                for part, value in expected.items():
                    torch.testing.assert_close(
                        state[part],
                        value,
                        rtol=1e-12,
                        atol=1e-14,
                        msg=lambda m, n=name, p=part: f"{n}, {p}: {m}",
                    )


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_over_several_steps_every_sample_stays_in_its_step(path, task):
    numbers = [0, 1, 2, 3, 4]
    losses, expected, seen = train(LocalTransport(), path, task, numbers, None)
    for name in ("greedy", "fixed"):
        ranks = run_ranks(3, train, path, task, numbers, name)
        for step, keys in enumerate(seen):
            assert sorted(key for _, _, mine in ranks for key in mine[step]) == sorted(keys), (
                name,
                step,
            )
        for actual_losses, actual, _ in ranks:
            assert [number for number, _ in actual_losses] == numbers
            assert [loss for _, loss in actual_losses] == pytest.approx(
                [loss for _, loss in losses], rel=1e-7
            )
            for part, value in expected.items():
                torch.testing.assert_close(actual[part], value, rtol=1e-5, atol=1e-8)
        moved = [set(mine[0]) for _, _, mine in ranks]
        unbalanced = [set(mine[0]) for _, _, mine in run_ranks(3, train, path, task, [0], None)]
        assert moved != unbalanced, f"{name} moved nothing: the comparison would prove nothing"


def _bad_partitioner(transport, path, kind):
    def clever(problem):
        result = problem.home.copy()
        if kind == "crash" and transport.rank == 1:
            raise KeyError("no such thing")
        if kind == "outside":
            result[2] = 7
        if kind == "differs" and transport.rank == 1:
            result[0] = 1 - result[0]
        return result

    PARTITIONERS["clever"] = clever
    train(transport, path, "retrieval", [0, 1], "clever")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("outside", "partitioner 'clever' gives sample 2 to rank 7 of 2"),
        ("differs", "partitioner 'clever' decided differently on different ranks"),
        ("crash", "no such thing|partitioner 'clever' failed on rank 1"),
    ],
)
def test_bad_partitioners_fail_on_all_ranks(path, kind, message):
    import re

    for error, _ in gather_ranks(2, _bad_partitioner, path, kind):
        assert error is not None and re.search(message, error), error


def test_a_cap_that_cannot_be_met(path):
    for error, _ in gather_ranks(2, _capped, path):
        assert error is not None and "over the cap of 3 per rank" in error


def _capped(transport, path):
    data = Histories(path, 13, rank=transport.rank, world=transport.world)
    encoder = HSTU(width=8, layers=1, heads=2, max_length=200)
    model = Retrieval(
        encoder, num_items=data.num_items, num_actions=data.num_actions, table_device="meta"
    )
    parallel = freescale.parallelize(model, model.features, transport=transport)
    pipeline = freescale.Pipeline(
        parallel,
        torch.optim.SGD(parallel.dense_parameters(), lr=0.1),
        balance=Balancer(PARTITIONERS["greedy"], COST, cap=3),
    )
    list(pipeline.run(data))


def _uneven(transport, counts, balanced=True):
    from helpers.toys import clicks_batch

    _, pipeline = build(
        transport, balance=Balancer(PARTITIONERS["greedy"], COST) if balanced else None
    )
    batches = [clicks_batch(4, seed) for seed in range(counts[transport.rank])]
    return [(r.batch_number, r.loss) for r in pipeline.run(batches)]


@pytest.mark.parametrize("counts", [(3, 5, 2), (0, 5, 2), (5, 0, 0)])
def test_ranks_whose_data_ends_early_get_samples_of_the_others(counts):
    """A rank that never had a batch learns its features from the others: whatever is given to it is
    computed, nothing is lost."""
    unbalanced = run_ranks(3, _uneven, counts, False)
    steps = run_ranks(3, _uneven, counts)
    assert [len(s) for s in steps] == [5, 5, 5]
    losses = [[loss for _, loss in s] for s in steps]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] == pytest.approx([loss for _, loss in unbalanced[0]], rel=1e-9)


class Logged:
    """greedy, with a record of what it decided."""

    def __init__(self):
        self.decided, self.times = [], []

    def __call__(self, problem):
        result = PARTITIONERS["greedy"](problem)
        self.decided.append(result.tolist())
        self.times.append(problem.times)
        return result


def _adapting(transport, schedule, steps, state=None):
    from helpers.toys import clicks_batch

    logged = Logged()
    balancer = Balancer(logged, COST, adapt=True)
    _, pipeline = build(transport, balance=balancer, schedule=schedule)
    if state is not None:
        pipeline.load_state_dict(state)
    first = pipeline.steps
    batches = [clicks_batch(6, 10 * seed + transport.rank) for seed in range(first, first + steps)]
    for _ in pipeline.run(batches):
        if pipeline.steps == first + steps - 1:  # the data has one batch more
            # one batch is planned, not computed
            saved = json.loads(json.dumps(pipeline.state_dict()))
    return logged.decided, logged.times, balancer.error, balancer.adaptive.state_dict(), saved


@pytest.mark.parametrize("schedule", ["serial", "staged"])
def test_adapting_learns_the_same_on_all_ranks_and_a_checkpoint_keeps_what_is_in_flight(schedule):
    ranks = run_ranks(2, _adapting, schedule, 12)
    decided, times, error, learned, saved = ranks[0]
    assert ranks[1][0] == decided and ranks[1][3] == learned, "ranks learned different things"
    # Not what it learned: these batches take so little time that it may be noise, which leaves the
    # cost as it was.
    assert learned["scale"] is not None and learned["information"][0][1] > 0 and error is not None
    assert times[0] is None and all((t > 0).all() for t in times[3:]), (
        "no times reached the partitioner"
    )
    assert (
        list(saved["balancer"]["assignments"]) == ["12"]
        and saved["balancer"]["assignments"]["12"] == decided[11]
    )
    resumed = run_ranks(2, _adapting, schedule, 5, saved)
    assert len(resumed[0][0]) == 4, "the batch in flight was planned again"
    assert resumed[0][4]["balancer"]["cost"] != saved["balancer"]["cost"]
    elsewhere = run_ranks(3, _adapting, schedule, 5, saved)
    assert len(elsewhere[0][0]) == 5


def _frozen(transport):
    from helpers.toys import clicks_batch

    logged = Logged()
    balancer = Balancer(logged, COST)
    _, pipeline = build(transport, balance=balancer)
    list(pipeline.run([clicks_batch(6, seed) for seed in range(5)]))
    return logged.times, balancer.error, pipeline.state_dict()["balancer"]


def test_frozen_assignments_see_no_times():
    times, error, state = run_ranks(2, _frozen)[0]
    assert times == [None] * 5 and state == {}
    assert error is not None, "the prediction error is measured all the same"
