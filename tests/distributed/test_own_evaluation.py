"""`freescale.evaluate` and `sharded.reading` on one and two ranks against a plain torch model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.toys import Clicks, clicks_batch, rank_slice
from torch import nn

import freescale
from freescale.batch import SequenceBatch
from freescale.transport.local import LocalTransport


class Plain(Clicks):
    """Clicks with weights of its own, and dropout that evaluation must not see."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.item = nn.Embedding(200, 8, dtype=torch.float64)
        self.action = nn.Embedding(5, 8, dtype=torch.float64)
        self.layers.insert(1, nn.Dropout(0.5))


def errors(batch, output):
    """A value per sample, a pair, and a pair whose weight is 0."""
    return {
        "longest": batch.sequences["history"].lengths.double(),
        "click": (output["click"], len(batch)),
        "never": (output["like"], 0.0),
    }


def expected(model, batches):
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        clicks = sum(float(model(batch)["click"]) for batch in batches)
    lengths = torch.cat([batch.sequences["history"].lengths for batch in batches]).double()
    return {"click": clicks / lengths.numel(), "longest": float(lengths.mean())}


def whole_model(sharded, plain):
    """The sharded model's present values in a plain one. A collective."""
    whole = copy.deepcopy(plain)
    sharded.tables.lease.flush()
    with torch.no_grad():
        for name in ("item", "action"):
            rows = torch.zeros_like(getattr(whole, name).weight)
            ids, mine = sharded.tables.get_local_rows(name)
            rows[ids] = mine
            getattr(whole, name).weight.copy_(sharded.transport.all_reduce(rows, "rows").wait())
        whole.layers.load_state_dict(sharded.module.layers.state_dict())
    return whole


def _evaluate(transport, placement):
    """-> for each evaluation, what was found and what the plain model says."""
    rank, world = transport.rank, transport.world
    plain = Plain(seed=rank)  # ranks that were seeded differently: rank 0's weights count
    sharded = freescale.parallelize(
        copy.deepcopy(plain),
        Clicks.ids,
        freescale.SGD(lr=0.5),
        transport=transport,
        placement=placement,
    )
    batches = [clicks_batch(7, seed) for seed in range(4)]
    mine = [rank_slice(batch, rank, world) for batch in batches[: 1 if rank else 4]]
    # what rank 1 lacks of the last batches is nobody's: uneven ends
    seen = batches if world == 1 else [batches[0], *(rank_slice(b, 0, 2) for b in batches[1:])]
    results = [(freescale.evaluate(sharded, mine, errors), expected(Plain(seed=0), seen))]
    pipeline = freescale.Pipeline(
        sharded, torch.optim.SGD(sharded.dense_parameters(), lr=0.1), schedule="staged"
    )
    sharded.module.layers[1].eval()  # stays as it is
    training = [rank_slice(clicks_batch(6, seed), rank, world) for seed in range(9, 13)]
    for _ in pipeline.run(training):
        found = freescale.evaluate(sharded, mine, errors)
        results.append((found, expected(whole_model(sharded, plain), seen)))
        assert sharded.training and not sharded.module.layers[1].training
    nobody = freescale.evaluate(sharded, [])
    alone = freescale.evaluate(sharded, mine if rank == 0 else [], errors)
    with sharded.reading(mine[0] if rank == 0 else None) as batch:
        scores = sharded.eval()(batch)["click"] if len(batch) else None
    oracle = whole_model(sharded, plain).eval()
    if rank == 0:
        assert not scores.requires_grad
        torch.testing.assert_close(scores, oracle(mine[0])["click"].detach())
    losses = freescale.evaluate(sharded, [rank_slice(batches[0], rank, world)])
    with torch.no_grad():
        sums = oracle(batches[0])
    return results, nobody, alone, losses, {task: float(loss) / 7 for task, loss in sums.items()}


@pytest.mark.parametrize(
    ("world", "placement"), [(1, "sharded"), (2, "sharded"), (2, "replicated")]
)
def test_evaluation_equals_a_plain_model(world, placement):
    everyone = (
        [_evaluate(LocalTransport(), placement)]
        if world == 1
        else run_ranks(world, _evaluate, placement)
    )
    for results, nobody, alone, losses, sums in everyone:
        assert len(results) == 5 and nobody == {}
        for found, oracle in results:
            assert math.isnan(found.pop("never"))
            assert found == pytest.approx(oracle, rel=1e-12)
        assert losses == pytest.approx(sums, rel=1e-12)
        assert alone["longest"] == everyone[0][2]["longest"]
    assert everyone[0][0][0][0] != everyone[0][0][-1][0], "training changed nothing"


def _fails(transport, where):
    sharded = freescale.parallelize(Clicks(), Clicks.ids, transport=transport)

    def fn(batch, output):
        if where == "fn" and transport.rank == 1:
            raise ValueError("no such measure")
        return {"click": (output["click"], len(batch))}

    batch = clicks_batch(3, 0)
    if where == "batch" and transport.rank == 1:
        batch = SequenceBatch(dense={"extra": torch.full((3, 3), 10**6)}, weights=batch.weights)
    try:
        freescale.evaluate(sharded, [batch], fn)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("where", "message"),
    [("fn", "no such measure"), ("batch", "holds id 1000000, but table 'item'")],
)
def test_a_failure_of_one_rank_reaches_all(where, message):
    (kind, first), (other, second) = run_ranks(2, _fails, where)
    assert (kind, other) == ("RemoteError", "ValueError")
    assert message in second and first == f"rank 1 stopped: ValueError: {second}"


def test_reading_before_the_first_step_and_with_what_is_missing():
    sharded = freescale.parallelize(Plain(), Clicks.ids)
    batch = clicks_batch(5, 1)
    with sharded.reading(batch) as there:
        output = sharded.eval()(there)
    assert float(output["click"]) == pytest.approx(float(Plain().eval()(batch)["click"].detach()))
    with pytest.raises(RuntimeError, match="read outside a step"):
        sharded(batch)
