"""Negatives by popularity, the probabilities that correct for draws, and the full softmax, each
against a plain oracle."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.loading import load_histories
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from freescale.config import RunConfig
from freescale.data import Histories
from freescale.data.batches import negatives as module
from freescale.data.batches.alias import AliasTable
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU

ITEMS = 12
LENGTH = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A file of skewed items and its histories. Item 11 occurs where it is held out only."""
    draw = random.Random(1)
    rows = []
    for length in [0, 3, 4, 5, 9, 12, 2, 7] * 6:
        items = [min(10, int(draw.expovariate(0.4))) for _ in range(length)]
        rows.append(items[:-1] + [11] if items else items)
    path = tmp_path_factory.mktemp("negatives") / "histories.parquet"
    table = {
        "user_id": range(len(rows)),
        "item_id": rows,
        "timestamp": [list(range(len(row))) for row in rows],
    }
    pq.write_table(pa.table(table), path, row_group_size=10)
    return path, rows


def load(path: Path, **options) -> Histories:
    return load_histories(path, 16, **{"max_length": LENGTH, "num_items": ITEMS, **options})


def define_probabilities(rows, *, power: float | None, share: float) -> torch.Tensor:
    """[items]: how probable a draw is, from the histories themselves."""
    train = [row[:-2] for row in rows]
    targets = [row[1:][-LENGTH:] for row in train]
    counts = Counter(item for row in train for item in row)
    catalogue = [1.0 if power is None else counts[item] ** power for item in range(ITEMS)]
    chance = []
    for item in range(ITEMS):
        own = catalogue[item] / sum(catalogue)
        in_batch = sum(t.count(item) / len(t) if t else own for t in targets) / len(targets)
        chance.append(share * in_batch + (1 - share) * own)
    return torch.tensor(chance, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=40),
        st.lists(st.integers(0, 3), min_size=1, max_size=12),  # sums that are equal
    )
)
def test_an_alias_table_has_the_probabilities_of_its_weights(weights):
    weights = np.array(weights, float)
    if not weights.any():
        weights[0] = 1
    table, n = AliasTable.of(weights), len(weights)
    chance = table.filled / n + np.bincount(table.aliases, (1 - table.filled) / n, n)
    np.testing.assert_allclose(chance, weights / weights.sum(), rtol=1e-9, atol=1e-12)
    assert (table.filled[weights == 0] == 0).all() and (weights[table.aliases] > 0).all()


@pytest.mark.parametrize("per", ["sample", "position", "batch"])
@pytest.mark.parametrize(
    "source, power, share",
    [("popularity", 0.75, 0.0), ("popularity", 1.0, 0.5), ("uniform", None, 1.0)],
)
def test_log_q_is_the_probability_of_the_draws(data, per, source, power, share):
    """As defined, and as counted over an epoch of draws."""
    path, rows = data
    options = {} if power is None else {"popularity_power": power}
    loader = load(
        path, count=4000, per=per, source=source, in_batch_share=share,
        seed=3, epochs=12, **options,
    )  # fmt: skip
    expected = define_probabilities(rows, power=power, share=share)
    counts = torch.zeros(ITEMS)
    for batch in loader if per == "batch" else [loader.batch(number) for number in range(3)]:
        drawn, targets = batch.values("negatives"), batch.values("targets")
        torch.testing.assert_close(batch.values("negatives_log_q"), expected.log().float()[drawn])
        torch.testing.assert_close(batch.values("targets_log_q"), expected.log().float()[targets])
        assert batch.values("targets_log_q").isfinite().all()
        counts += torch.bincount(drawn.reshape(-1), minlength=ITEMS)
    assert expected.sum().item() == pytest.approx(1)
    # in-batch draws of one batch come from few samples: an epoch has them all
    near = 0.02 if share else 0.006
    torch.testing.assert_close((counts / counts.sum()).double(), expected, rtol=0, atol=near)
    if source == "popularity":
        assert counts[11] == 0  # held out: the training data does not know it


def test_what_is_drawn_alike_is_not_corrected(data):
    for options in ({}, {"log_q": True}, {"in_batch_share": 0.5, "log_q": False}):
        loader = load(data[0], per="sample", **options)
        names = {name for name in loader.batch(0).parts() if "log_q" in name}
        assert not names and not loader.negatives.log_q, options
    assert load(data[0], in_batch_share=0.5).negatives.log_q
    assert not load(data[0], source="all").negatives.log_q


def test_a_source_for_workers_draws_the_same(data):
    for options in ({"source": "popularity", "in_batch_share": 0.3}, {}):
        loader = load(data[0], count=9, per="position", **options)
        expected = loader.batch(2)
        for copy in (
            pickle.loads(pickle.dumps(loader)),
            load(data[0], count=9, per="position", start=2, **options),
        ):
            found = copy.batch(2)
            assert expected.parts().keys() == found.parts().keys()
            assert all(map(torch.equal, expected.tensors(), found.tensors()))


def test_all_items_are_the_full_softmax(data):
    """The loss and its gradients are those of cross entropy over the catalogue."""
    batch = load(data[0], source="all", per="sample").batch(0)
    assert batch.shared["negatives"].tolist() == list(range(ITEMS))
    torch.manual_seed(0)
    encoder = HSTU(width=8, layers=1, heads=1, max_length=LENGTH, dropout=0.0)
    model = Retrieval(encoder, num_items=ITEMS, temperature=0.2).double()
    parameters = [p for p in model.parameters()]
    found = model(batch)["next_item"]
    queries = F.normalize(model.encode_history(batch), dim=1)
    scores = queries @ F.normalize(model.item.weight, dim=1).T / 0.2
    expected = F.cross_entropy(scores, batch.values("targets"), reduction="sum")
    torch.testing.assert_close(found, expected)
    ours, theirs = (
        torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (found, expected)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"count": 7}, "--negatives 7 with --negatives-from all: all 12 items"),
        ({"in_batch_share": 0.5}, "--in-batch-share 0.5 with --negatives-from all"),
        ({"num_items": 1 << 18}, "takes up to 131,072 items, the catalogue has 262,144"),
        (
            {"source": "popularity", "num_items": 1 << 40},
            "popularity and log-q are for up to 268,435,456",
        ),
        ({"source": "nonsense"}, "choose one of auto, uniform, popularity, all"),
    ],
)
def test_what_does_not_fit_is_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        load(data[0], **{"source": "all", **options})


def test_popularity_needs_training_events(tmp_path):
    path = tmp_path / "short.parquet"
    rows = [[1, 2], [3]]
    pq.write_table(pa.table({"user_id": [1, 2], "item_id": rows, "timestamp": rows}), path)
    loader = load_histories(path, 2, source="popularity")
    with pytest.raises(ValueError, match="no events to draw popular items from"):
        loader.batch(0)


def test_shared_negatives_are_of_popular_items(data):
    """Unless it is said otherwise; what is not to be corrected is drawn alike."""
    shared = load(data[0])
    chosen = shared.negatives
    assert (chosen.per, chosen.source, chosen.log_q) == ("batch", "popularity", True)
    assert "negatives_log_q" in shared.batch(0).shared
    for options, expected in (
        ({"count": 9}, ("sample", "uniform", False)),  # a number is of a sample
        ({"per": "sample"}, ("sample", "uniform", False)),
        ({"count": 9, "per": "batch"}, ("batch", "popularity", True)),
        ({"source": "uniform"}, ("batch", "uniform", False)),
        ({"log_q": False}, ("batch", "uniform", False)),
        ({"num_items": module.LARGEST_BY_DEFAULT + 1}, ("batch", "uniform", False)),
        ({"source": "all"}, ("batch", "all", False)),
    ):
        chosen = load(data[0], **options).negatives
        found = chosen.per, chosen.source, chosen.log_q
        assert found == expected, options


def test_a_run_from_before_the_correction_goes_on_without_it():
    settings = {"data": "x.parquet", "in_batch_share": 0.5}
    config = RunConfig.from_settings(settings)
    assert config.data.log_q is None and RunConfig.from_json(config.to_json()) == config
    old = json.loads(config.to_json())
    for name in ("log_q", "negatives_per", "negatives_from", "popularity_power"):
        del old["data"][name]
    read = RunConfig.from_json(json.dumps(old)).data
    assert read.log_q is False
    assert (read.negatives_per, read.negatives_from) == ("sample", "uniform")
    assert not module.choose_log_q(read.log_q, read.negatives_from, read.in_batch_share)
