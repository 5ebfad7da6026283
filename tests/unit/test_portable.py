"""The padded models against the jagged ones, and as programs of torch.export."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models import HSTU, FeatureTables, Ranking, Retrieval, SASRec
from freescale.models.encoder import Encoder
from freescale.models.features import add_features, sum_features
from freescale.recommend.portable import PaddedHead, trace
from freescale.visible import Visible

ITEMS, ACTIONS, ROWS, LONGEST, WIDTH = 30, 4, 11, 13, 8
PLACES = {"event": 2, "context": 3}
USER_PLACES = (1, 2, 1)
VECTORS = torch.randn(ITEMS + 1, 4, generator=torch.Generator().manual_seed(5))
ENCODERS = ["hstu", "position", "time", "none", "sasrec", "semi-local", "sasrec, semi-local"]


class Features:
    """Of the items: what a FeatureStore knows of them."""

    vector_widths = (4,)

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.codes = torch.randint(0, ROWS, (ITEMS, 3), generator=generator)
        self.own = (torch.rand(ITEMS, generator=generator) - 0.3).clamp(min=0)

    def find_items(self, ids):
        return self.codes[ids], self.own[ids]

    def find_vectors(self, ids):
        return torch.where(ids % 6 == 0, ITEMS, ids)


FEATURES = Features()


def make_encoder(kind, longest=LONGEST):
    sizes = {"width": WIDTH, "layers": 2, "heads": 2, "max_length": longest, "dropout": 0.3}
    sizes["visible"] = Visible(1, 2) if "semi-local" in kind else None
    if kind.startswith("sasrec"):
        return SASRec(**sizes, hidden=12)
    biases = {
        "position_bias": kind in ("hstu", "position", "semi-local"),
        "time_bias": kind in ("hstu", "time"),
    }
    return HSTU(**sizes, d_qk=3, d_v=5, num_time_buckets=16, **biases)


def make_model(kind, task="retrieval", features=True):
    torch.manual_seed(3)
    tables = FeatureTables()
    if features:
        tables = FeatureTables(ROWS, ROWS, ROWS, USER_PLACES, [VECTORS], ROWS)
    options = {"num_items": ITEMS, "feature_tables": tables, "num_actions": ACTIONS * features}
    encoder = make_encoder(kind)
    if task == "retrieval":
        model = Retrieval(encoder, **options)
    else:
        model = Ranking(encoder, tasks=("click", "like"), **options)
    with torch.no_grad():  # biases and rows of a size that matters
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model.eval()


def draw(lengths, counts, seed=0):
    """A jagged batch and the same as inputs of a padded head, with numbers that nobody may read
    in the padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)

    def integers(bound, *shape):
        return torch.randint(0, bound, shape, generator=generator)

    columns = {
        "items": integers(ITEMS, *shape),
        "actions": integers(ACTIONS, *shape),
        "times": integers(10**4, *shape).cumsum(1),
        "event_features": integers(ROWS, *shape, PLACES["event"]),
        "user_features": integers(ROWS, shape[0], sum(USER_PLACES)),
        "context_features": integers(ROWS, shape[0], PLACES["context"]),
        "candidates": integers(ITEMS, shape[0], max(counts)),
    }
    columns["candidate_times"] = columns["times"].amax(1, keepdim=True) + integers(
        10**4, shape[0], max(counts)
    )
    columns["each_context"] = integers(ROWS, shape[0], max(counts), PLACES["context"])
    there = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    offered = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    jagged = {n: Jagged(columns[n][there], torch.tensor(lengths)) for n in
              ("items", "actions", "times", "event_features")}  # fmt: skip
    sequences = {
        "history": jagged["items"],
        "actions": jagged["actions"],
        "timestamps": jagged["times"],
        "event_features": jagged["event_features"],
    }
    ids = columns["candidates"][offered]
    of, ones = torch.tensor(counts), torch.ones_like(ids)
    sequences["candidate_timestamps"] = Jagged(columns["candidate_times"][offered], of)
    nested = {"candidates": ids}
    codes, own = FEATURES.find_items(jagged["items"].values)
    about = {
        "features": codes,
        "own": own,
        "vectors": FEATURES.find_vectors(jagged["items"].values),
    }
    sequences |= {f"history_{name}": Jagged(v, torch.tensor(lengths)) for name, v in about.items()}
    codes, own = FEATURES.find_items(ids)
    nested |= {"candidates_features": codes, "candidates_own": own}
    nested["candidates_vectors"] = FEATURES.find_vectors(ids)
    candidates = {name: Nested(values, ones, of) for name, values in nested.items()}
    dense = {name: columns[name] for name in ("user_features", "context_features")}
    for name in ("items", "actions", "event_features"):
        columns[name][~there] = 10**9
    columns["times"][~there] = -(10**12)
    columns["lengths"] = torch.tensor(lengths)
    batch = SequenceBatch(sequences, candidates, dense, keys=torch.arange(len(lengths)))
    requests = columns.pop("each_context")
    return batch, columns, Jagged(requests[offered], of), requests, offered


def fold(model):
    """The same model with the features of items as a part of their rows."""
    if model.item_features is None:
        return model
    model, ids = deepcopy(model), torch.arange(ITEMS)
    with torch.no_grad():
        codes, own = FEATURES.find_items(ids)
        rows = add_features(model.item.weight, own, sum_features(model.item_features, codes))
        rows = rows + model.item_vectors[0](FEATURES.find_vectors(ids))
        model.item.weight.copy_(rows)
    model.item_features, model.item_vectors = None, torch.nn.ModuleList()
    return model


def evaluate(model, lengths, counts, seed=0):
    """The jagged outputs, and a function of a padded head or program that gives its own."""
    batch, columns, of_candidates, requests, offered = draw(lengths, counts, seed)
    head = PaddedHead(fold(model))
    inputs = head.list_inputs(PLACES)
    if isinstance(model, Ranking):
        sequences = {**batch.sequences, "context_features": of_candidates}
        batch = SequenceBatch(sequences, batch.candidates, batch.dense, keys=batch.keys)
        columns["context_features"] = requests
    given = {each.name: columns[each.name] for each in inputs}

    def run(program):
        found = program(**given)
        return found if isinstance(model, Retrieval) else found[offered]

    with torch.no_grad():
        kind = model.encode_queries if isinstance(model, Retrieval) else model.predict
        return kind(batch), head, inputs, run


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, LONGEST), st.integers(0, 5)), min_size=1, max_size=5
    ).filter(lambda sizes: max(n for n, _ in sizes) > 0 and max(c for _, c in sizes) > 0),
    seed=st.integers(0, 2**30),
)
def test_padded_is_jagged(kind, task, features, sizes, seed):
    lengths, counts = (list(each) for each in zip(*sizes, strict=True))
    expected, head, _, run = evaluate(make_model(kind, task, features), lengths, counts, seed)
    with torch.no_grad():
        torch.testing.assert_close(run(head), expected, rtol=0, atol=1e-5)
    model = make_model(kind, task, features).double()
    expected, head, _, run = evaluate(model, lengths, counts, seed)
    with torch.no_grad():
        torch.testing.assert_close(run(head), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize("kind", ["hstu", "sasrec", "pooled"])
def test_a_program_takes_any_batch(kind, task, tmp_path):
    model = make_model(kind, task)
    _, head, inputs, _ = evaluate(model, [3, 2], [2, 2])
    traced = trace(head, inputs)
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert all("aten." in call or call.startswith("<built-in") for call in calls)
    torch.export.save(traced, tmp_path / "encoder.pt2")
    program = torch.export.load(tmp_path / "encoder.pt2").module()
    sizes = [
        ([1], [1]),
        ([LONGEST] * 3, [4, 0, 1]),
        ([0, 1], [1, 1]),
        ([7], [5]),
        ([LONGEST, 0, 5, 9, 2, 8, 4], [1] * 7),
    ]
    for lengths, counts in sizes:
        expected, _, _, run = evaluate(model, lengths, counts)
        torch.testing.assert_close(run(program), expected, rtol=0, atol=1e-5)
    too_long = {
        each.name: torch.zeros(
            [
                LONGEST + 1 if axis == "length" else 2 if isinstance(axis, str) else axis
                for axis in each.shape
            ],
            dtype=torch.int64,
        )
        for each in inputs
    }
    with pytest.raises(AssertionError, match=rf"size\(\)\[1\] <= {LONGEST}"):
        program(**too_long)


def test_only_what_the_model_reads_is_an_input():
    names = {}
    for kind in ("hstu", "sasrec"):
        for task in ("retrieval", "ranking"):
            head = evaluate(make_model(kind, task, features=False), [2], [1])[1]
            names[kind, task] = [each.name for each in head.list_inputs({})]
    assert names["sasrec", "retrieval"] == ["items", "lengths"]
    assert names["hstu", "retrieval"] == ["items", "lengths", "times"]
    assert names["sasrec", "ranking"] == ["items", "lengths", "candidates"]
    assert names["hstu", "ranking"][2:] == ["times", "candidates", "candidate_times"]


def test_an_encoder_of_another_kind_is_refused():
    class Mine(Encoder):
        def forward(self, x, *inputs, **options):
            return x

    options = {"width": 8, "max_length": 4, "dropout": 0.0, "input_scale": 1.0}
    model = Retrieval(Mine(**options, input_dropout=None), num_items=3)
    with pytest.raises(ValueError, match="Mine has no portable form; HSTU and SASRec"):
        PaddedHead(model)
