"""The serial schedule on several ranks against one process, and against a plain torch model."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import gather_ranks, run_ranks
from helpers.toys import Clicks, clicks_batch, rank_slice
from helpers.training import assert_close, build, gather_tables, snapshot
from torch import nn

import freescale
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.pipeline.dense import buckets
from freescale.transport.local import LocalTransport

OPTIMIZERS = list(ROW_OPTIMIZERS)
STATES = (0, 3, 7)  # steps made before the step that is compared


def train(transport, sizes, optimizer, placement, options):
    parallel, pipeline = build(transport, optimizer, placement, **options)
    batches = [
        rank_slice(clicks_batch(n, seed), transport.rank, transport.world)
        for seed, n in enumerate(sizes)
    ]
    snapshots, losses = [], []
    for result in pipeline.run(batches):
        losses.append(result.loss)
        snapshots.append(snapshot(parallel))
    return losses, snapshots


def one_step_from(transport, state, batch, optimizer, placement, options):
    """A step from a given state: tables, row state, dense weights (dense optimizer fresh) set on
    every rank."""
    parallel, pipeline = build(transport, optimizer, placement, **options)
    parallel.tables.place()
    for name in parallel.tables.specs:
        rows = parallel.tables.get_group(name).rows
        for part, local in rows.get_tensors(name).items():
            local.copy_(state[f"{name}/{part}"][rows.get_ids(name)])
    with torch.no_grad():
        for name, parameter in parallel.module.named_parameters():
            parameter.copy_(state[name])
    pipeline.load_state_dict({"steps": 4})
    (result,) = pipeline.run([rank_slice(batch, transport.rank, transport.world)])
    return result.loss, snapshot(parallel)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_one_step_equals_one_process(world, placement):
    cases = [(optimizer, state) for optimizer in OPTIMIZERS for state in STATES]
    run_ranks(world, _check_cases, cases, placement, {"clip": 0.5, "accumulate": 2})


def _check_cases(transport, cases, placement, options):
    for optimizer, steps in cases:
        _, states = train(LocalTransport(), [13] * (steps + 1), optimizer, placement, options)
        batch = clicks_batch(13, 100 + steps)
        expected = one_step_from(
            LocalTransport(), states[steps], batch, optimizer, placement, options
        )
        actual = one_step_from(transport, states[steps], batch, optimizer, placement, options)
        assert actual[0] == pytest.approx(expected[0], rel=1e-12)
        assert_close(actual[1], expected[1])
        # A step that changes nothing would pass the comparison: it must not pass the test.
        assert not torch.equal(actual[1]["item/rows"], states[steps]["item/rows"])


def test_against_plain_torch():
    """SGD tables: the whole thing equals a plain model with nn.Embedding and torch.optim.SGD on the
    global mean."""
    parallel, _ = build(LocalTransport(), "sgd", "sharded")
    parallel.tables.place()
    start = snapshot(parallel)
    plain = Clicks()
    plain.to_empty(device="cpu")
    with torch.no_grad():
        plain.item.weight.copy_(start["item/rows"])
        plain.action.weight.copy_(start["action/rows"])
        for name, parameter in plain.layers.named_parameters():
            parameter.copy_(start[f"layers.{name}"])
    tables = torch.optim.SGD([plain.item.weight, plain.action.weight], lr=0.1)
    dense = torch.optim.AdamW(plain.layers.parameters(), lr=1e-2)
    for seed in range(3):
        batch = clicks_batch(11, seed)
        loss = sum(plain(batch).values()) / len(batch)
        tables.zero_grad()
        dense.zero_grad()
        loss.backward()
        tables.step()
        dense.step()
    losses, snapshots = run_ranks(2, train, [11, 11, 11], "sgd", "sharded", {})[0]
    torch.testing.assert_close(
        snapshots[-1]["item/rows"], plain.item.weight.detach(), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        snapshots[-1]["action/rows"], plain.action.weight.detach(), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        snapshots[-1]["layers.0.weight"], plain.layers[0].weight.detach(), rtol=1e-10, atol=1e-12
    )
    assert losses[-1] == pytest.approx(loss.item(), rel=1e-10)


class Gated(Clicks):
    """Each of four layers is used in some of the steps only: the first by all samples, the second
    by the first one, the third by the last one; the fourth never."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4))

    def forward(self, batch):
        losses, step, keys = super().forward(batch), batch.number, batch.keys
        in_steps = step % 2 == 0, step % 3 == 1, step == 2, False
        users = keys >= 0, keys == 0, keys == 6, keys >= 0
        for gate, on, using in zip(self.gates, in_steps, users, strict=True):
            if on and using.any():
                losses["click"] = losses["click"] + using.sum() * gate(gate.bias).sum()
        return losses


DENSE = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _train_gated(transport, schedule, dense, least, options):
    """-> dense weights, whether each has a state, and the rows, which stay as they are."""
    buckets._LEAST_BYTES = {"cpu": least}
    torch.manual_seed(3)
    row_optimizer = ROW_OPTIMIZERS["sgd"](lr=0.0)
    model = {"transport": transport, "placement": "sharded", "init_std": 0.3, "seed": 5}
    parallel = freescale.parallelize(Gated(), Gated.ids, row_optimizer, **model)
    optimizer = DENSE[dense](parallel.dense_parameters())
    pipeline = freescale.Pipeline(parallel, optimizer, schedule=schedule, check=False, **options)
    batches = [
        rank_slice(clicks_batch(7, step), transport.rank, transport.world) for step in range(5)
    ]
    assert len(list(pipeline.run(batches))) == 5
    named = dict(parallel.module.named_parameters())
    return (
        {name: value.detach().clone() for name, value in named.items()},
        {name: value in optimizer.state for name, value in named.items()},
        {name: gather_tables(parallel)[f"{name}/rows"] for name in ("item", "action")},
    )


def _train_gated_cases(transport, cases):
    return [_train_gated(transport, *case) for case in cases]


def _train_plain(dense, rows):
    torch.manual_seed(3)
    plain = Gated()
    plain.item, plain.action = (nn.Embedding.from_pretrained(rows[n]) for n in ("item", "action"))
    optimizer = DENSE[dense]([p for p in plain.parameters() if p.requires_grad])
    for step in range(5):
        optimizer.zero_grad()
        (sum(plain(clicks_batch(7, step)).values()) / 7).backward()
        optimizer.step()
    return plain, optimizer


@pytest.mark.parametrize("world", [1, 2, 3])
def test_dense_parameters_that_no_rank_uses_are_left_alone(world):
    """As by plain torch: no weight decay, no momentum, no state before the first gradient. In one
    bucket and in several."""
    shapes = [
        (1 << 18, {"clip": 1e9}),
        (64, {"accumulate": 2}),
        (64, {"dense_sums": "partitioned"}),
    ]
    cases = [
        (schedule, dense, *shape)
        for dense in DENSE
        for shape in shapes
        for schedule in ("serial", "staged")
    ]
    everyone = run_ranks(world, _train_gated_cases, cases)
    for (_, dense, *_), *found in zip(cases, *everyone, strict=True):
        plain, optimizer = _train_plain(dense, found[0][2])
        for weights, states, _ in found:
            for name, value in weights.items():
                parameter = plain.get_parameter(name)
                torch.testing.assert_close(value, parameter.detach(), rtol=1e-10, atol=1e-12)
                assert states[name] == (parameter in optimizer.state)
        assert not found[0][1]["gates.3.bias"] and found[0][1]["gates.2.bias"]
    for serial, staged in zip(everyone[0][::2], everyone[0][1::2], strict=True):
        assert all(torch.equal(value, staged[0][name]) for name, value in serial[0].items())


def test_only_rows_that_were_read_change():
    for placement in ("sharded", "replicated"):
        for optimizer in OPTIMIZERS:
            _check_lazy(placement, optimizer)


def _check_lazy(placement, optimizer):
    parallel, pipeline = build(LocalTransport(), optimizer, placement)
    parallel.tables.place()
    list(pipeline.run([clicks_batch(9, 0)]))
    before = snapshot(parallel)
    batch = clicks_batch(2, 1)
    list(pipeline.run([batch]))
    after = snapshot(parallel)
    read = torch.zeros(200, dtype=torch.bool)
    read[batch.values("history")] = True
    read[batch.values("extra").reshape(-1)] = True
    changed = (before["item/rows"] != after["item/rows"]).any(1)
    assert changed.any() and not changed[~read].any()


def test_ranks_without_samples_and_uneven_ends():
    """Batches smaller than the number of ranks, and ranks whose data ends early: nothing hangs,
    results agree."""
    one = train(LocalTransport(), [2, 1, 3, 2], "adam", "sharded", {})
    four = run_ranks(4, train, [2, 1, 3, 2], "adam", "sharded", {})
    for losses, snapshots in four:
        assert losses[0] == pytest.approx(one[0][0], rel=1e-12)
        assert losses[-1] == pytest.approx(one[0][-1], rel=1e-8)
        assert_close(snapshots[0], one[1][0])
    steps = run_ranks(3, _uneven)
    assert [len(s) for s in steps] == [5, 5, 5]
    losses = [[loss for _, loss in s] for s in steps]
    assert losses[0] == losses[1] == losses[2], "a rank without data still knows the loss"


def _uneven(transport):
    _, pipeline = build(transport)
    batches = [clicks_batch(4, seed) for seed in range((0, 5, 2)[transport.rank])]
    return [(r.batch_number, r.loss) for r in pipeline.run(batches)]


def test_data_error_on_one_rank_reaches_all():
    results = gather_ranks(3, _bad_data)
    assert "holds id 999, but table 'item' has rows 0 to 199" in results[1][0]
    for rank in (0, 2):
        assert (
            "RemoteError: rank 1 stopped: ValueError: feature 'history' holds id 999"
            in results[rank][0]
        )


def _bad_data(transport):
    _, pipeline = build(transport)

    def batches():
        yield clicks_batch(4, 0)
        bad = clicks_batch(4, 1)
        if transport.rank == 1:
            bad.sequences["history"].values[0] = 999
        yield bad

    list(pipeline.run(batches()))


def test_initial_tables_do_not_depend_on_ranks():
    one = _initial(LocalTransport())
    for world in (2, 3):
        for actual in run_ranks(world, _initial):
            for name, value in one.items():
                assert torch.equal(actual[name], value), name


def _initial(transport):
    parallel, _ = build(transport)
    parallel.tables.place()
    return gather_tables(parallel)
