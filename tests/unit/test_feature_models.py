"""Models with features of items and events, against the formula, position by position."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import feature_cases
from torch.nn import functional as F

import freescale
from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models import HSTU, FeatureTables, Ranking, Retrieval, SASRec, sum_features
from freescale.transport.local import LocalTransport

ITEMS, ROWS, EVENT_ROWS, PLACES = 30, 12, 7, 3
# of each item; the last row is of items without a vector
VECTORS = torch.randn(ITEMS + 1, 4, generator=torch.Generator().manual_seed(5)).half()
VECTORS[-1] = 0
LENGTHS = torch.tensor([4, 0, 3])


def make_encoder(kind):
    sizes = {"width": 8, "layers": 2, "heads": 2, "max_length": 9}
    return HSTU(**sizes) if kind == "hstu" else SASRec(**sizes)


def draw(seed=0):
    """What each item's features are, and whether its own row counts."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, ROWS, (ITEMS, PLACES), generator=generator)
    own = (torch.rand(ITEMS, generator=generator) - 0.3).clamp(min=0)
    return codes, own


def make_batch(codes, own, per="sample"):
    generator = torch.Generator().manual_seed(1)
    tokens = int(LENGTHS.sum())
    shape = {"sample": (3, 5), "position": (tokens, 5), "batch": (5,)}[per]
    ids = {
        "history": torch.randint(0, ITEMS, (tokens,), generator=generator),
        "targets": torch.randint(0, ITEMS, (tokens,), generator=generator),
        "negatives": torch.randint(0, ITEMS, shape, generator=generator),
    }
    homes = {"sample": "dense", "position": "sequences", "batch": "shared"}
    parts = {"sequences": {}, "dense": {}, "shared": {}}
    for name, values in ids.items():
        home = homes[per] if name == "negatives" else "sequences"
        columns = {name: values, f"{name}_features": codes[values], f"{name}_own": own[values]}
        columns[f"{name}_vectors"] = torch.where(values % 6 == 0, ITEMS, values)
        for column, value in columns.items():
            parts[home][column] = Jagged(value, LENGTHS) if home == "sequences" else value
    events = torch.randint(0, EVENT_ROWS, (tokens, 2), generator=generator)
    parts["sequences"]["event_features"] = Jagged(events, LENGTHS)
    requests = torch.randint(0, EVENT_ROWS, (tokens, 2), generator=generator)
    parts["sequences"]["context_features"] = Jagged(requests, LENGTHS)
    parts["sequences"]["timestamps"] = Jagged(torch.arange(tokens), LENGTHS)
    weights = {"next_item": LENGTHS.float()}
    return SequenceBatch(**parts, weights=weights, keys=torch.arange(3))


def make_model(kind, **more):
    torch.manual_seed(0)
    tables = FeatureTables(ROWS, EVENT_ROWS, vectors=[VECTORS], context=EVENT_ROWS)
    model = Retrieval(
        make_encoder(kind), num_items=ITEMS, temperature=0.3, feature_tables=tables, **more
    )
    return model.double()


def compute_loss(model, batch, per):
    """The loss by its definition: vectors of all positions, logits, softmax."""

    def embed(name):
        ids, codes = batch.values(name), batch.values(f"{name}_features")
        own = model.item.weight[ids] * batch.values(f"{name}_own")[..., None]
        rows = model.item_features.weight[codes] * (codes != 0)[..., None]
        numbers = VECTORS[batch.values(f"{name}_vectors")].double()
        return own + rows.sum(-2) + numbers @ model.item_vectors[0].projection.weight.T

    events = batch.values("event_features")
    x = embed("history")
    x = x + (model.event_features.weight[events] * (events != 0)[..., None]).sum(1)
    outputs = model.encoder(x, LENGTHS, batch.keys, batch.values("timestamps"))
    requests = batch.values("context_features")
    context = (model.context_features.weight[requests] * (requests != 0)[..., None]).sum(1)
    outputs = F.normalize(outputs + context, dim=1)
    targets, negatives = (F.normalize(embed(name), dim=-1) for name in ("targets", "negatives"))
    ids, wrong = batch.values("targets"), batch.values("negatives")
    owner = torch.repeat_interleave(torch.arange(3), LENGTHS)
    total = 0.0
    for place in range(len(ids)):
        at = {"sample": owner[place], "position": place, "batch": slice(None)}[per]
        logits = negatives[at] @ outputs[place] / 0.3
        logits = logits.masked_fill(wrong[at] == ids[place], -torch.inf)
        goal = targets[place] @ outputs[place] / 0.3
        total = total + torch.logsumexp(torch.cat([goal[None], logits]), 0) - goal
    return total


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@pytest.mark.parametrize("per", ["sample", "position", "batch"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_loss_and_its_gradients(kind, per, sharded):
    batch = make_batch(*draw(), per)
    plain = make_model(kind)
    expected = compute_loss(plain, batch, per)
    expected.backward()
    if not sharded:
        model = make_model(kind)
        loss = model(batch)["next_item"]
        loss.backward()
        for name, parameter in plain.named_parameters():
            mine = model.get_parameter(name).grad
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-12)
    else:
        model = freescale.parallelize(
            make_model(kind), plain.features, freescale.SGD(lr=1.0), transport=LocalTransport(),
            row_clip=None,
        )  # fmt: skip
        before = {
            name: parameter.detach() for name, parameter in make_model(kind).named_parameters()
        }
        dense = torch.optim.SGD(model.dense_parameters(), lr=0.0)
        (result,) = freescale.Pipeline(model, dense).run([batch])
        loss = torch.tensor(result.loss * float(LENGTHS.sum()), dtype=torch.float64)
        for name in ("item", "item_features", "event_features", "context_features"):
            ids, rows = model.tables.get_local_rows(name)
            step = before[f"{name}.weight"] - rows[ids.argsort()]
            gradient = plain.get_parameter(f"{name}.weight").grad / LENGTHS.sum()
            torch.testing.assert_close(step, gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)


def test_an_unknown_item_is_its_features_alone():
    codes, own = draw()
    model = make_model("hstu")
    index = torch.arange(ITEMS)
    rows = model.encode_items(model.item.weight, codes, own, index)
    with torch.no_grad():
        model.item.weight[own == 0] += 1.0
        again = model.encode_items(model.item.weight, codes, own, index)
        other = model.encode_items(model.item.weight, codes, 1 - own, index)
    assert torch.equal(rows, again) and not torch.equal(rows, other)
    with pytest.raises(AssertionError, match="the model has features of items"):
        model.encode_items(model.item.weight)


def test_ranking_describes_candidates_with_the_same_tables():
    codes, own = draw()
    torch.manual_seed(0)
    model = Ranking(
        make_encoder("hstu"), num_items=ITEMS, tasks=("click",), feature_tables=FeatureTables(ROWS)
    ).double()
    batch = make_batch(codes, own)
    ids = torch.tensor([3, 8, 2, 3])
    ones, counts = torch.ones(4, dtype=torch.int64), torch.tensor([2, 1, 1])
    columns = {"": ids, "_features": codes[ids], "_own": own[ids]}
    candidates = {f"candidates{n}": Nested(value, ones, counts) for n, value in columns.items()}
    found = model.predict(SequenceBatch(batch.sequences, candidates, keys=batch.keys))
    twin = Ranking(make_encoder("hstu"), num_items=ITEMS, tasks=("click",)).double()
    twin.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():  # the same vectors as rows of a plain table
        twin.item.weight.copy_(
            model.item.weight * own[:, None] + sum_features(model.item_features, codes)
        )
    plain = SequenceBatch(
        batch.sequences, {"candidates": candidates["candidates"]}, keys=batch.keys
    )
    torch.testing.assert_close(found, twin.predict(plain), rtol=1e-12, atol=0)


def test_a_candidate_sees_its_own_request_alone():
    torch.manual_seed(0)
    tables = FeatureTables(context=EVENT_ROWS)
    model = Ranking(
        make_encoder("hstu"), num_items=ITEMS, tasks=("click",), feature_tables=tables
    ).double()
    batch = make_batch(*draw())
    counts = torch.tensor([2, 1, 1])
    given = Nested(torch.tensor([3, 8, 2, 3]), torch.ones(4, dtype=torch.int64), counts)

    def predict(codes):
        sequences = {**batch.sequences, "context_features": Jagged(torch.tensor(codes), counts)}
        return model.predict(SequenceBatch(sequences, {"candidates": given}, keys=batch.keys))

    found, other = predict([[1], [1], [1], [1]]), predict([[1], [3], [1], [1]])
    assert (found != other).flatten().tolist() == [False, True, False, False]


def test_a_query_has_the_context_of_its_request():
    model, batch = make_model("hstu"), make_batch(*draw())
    with torch.no_grad():
        of_positions = model.encode_queries(batch)  # the last position's
        last = batch.values("context_features")[LENGTHS.cumsum(0) - 1]
        sequences = {n: s for n, s in batch.sequences.items() if n != "context_features"}
        request = replace(batch, sequences=sequences, dense={"context_features": last})
        assert torch.equal(model.encode_queries(request), of_positions)
        request = replace(request, dense={"context_features": (last + 1) % EVENT_ROWS})
        same = torch.isclose(model.encode_queries(request), of_positions).all(1)
        assert same.tolist() == [False, True, False]  # nothing is known of the second


def test_without_features_nothing_is_added():
    torch.manual_seed(0)
    model = Retrieval(make_encoder("hstu"), num_items=ITEMS)
    assert model.features == {"item": ["history", "targets", "negatives"]}
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"item", "encoder"}


def test_an_empty_batch():
    codes, own = draw()
    model = make_model("hstu")
    batch = make_batch(codes, own).slice(1, 2)
    assert model(batch)["next_item"].item() == 0.0
    assert torch.equal(model.encode_queries(batch), torch.zeros(1, 8, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@pytest.mark.parametrize("tables", feature_cases.SOME)
def test_one_rank_staged_is_serial_to_the_bit(kind, tables):
    (serial, rows), (staged, found) = (
        feature_cases.train("cpu", kind, "batch", schedule, feature_cases.SOME[tables])
        for schedule in ("serial", "staged")
    )
    assert staged == serial
    assert all(torch.equal(found[name], value) for name, value in rows.items())
