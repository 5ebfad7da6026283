"""Full-catalogue evaluation on several ranks against all scores in one process, by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.toys import rank_slice

import freescale
from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.embedding.layout import compute_keys
from freescale.ledger.ledger import Ledger
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.train.evaluate import area_under_curve, evaluate_ranking, normalized_entropy
from freescale.train.evaluate_retrieval import evaluate_retrieval
from freescale.train.sample_ranks import SampleRanks
from freescale.transport.local import LocalTransport

ITEMS = 37
BATCHES = ((0, 11), (1, 2))  # seed and samples: one of three ranks has none of the second
# ties, few events, and counts that no float tells apart
POPULARITY = 1 + torch.arange(ITEMS) // 4 + (torch.arange(ITEMS) >= 25) * (1 << 53)


def encoder():
    torch.manual_seed(1)
    return HSTU(
        width=8, layers=1, heads=2, max_length=10, dropout=0.3, position_bias=True, time_bias=True
    ).double()


def sharded(model, transport, placement):
    model.double()
    return freescale.parallelize(
        model, model.features, transport=transport, placement=placement, seed=4
    )


def retrieval_batch(seed, samples=7):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 10, (samples,), generator=generator)
    tokens = int(lengths.sum())
    history = torch.randint(0, ITEMS // 2, (tokens,), generator=generator)  # repeats among them
    target = torch.randint(0, ITEMS, (samples,), generator=generator)
    first = lengths.cumsum(0) - lengths
    for sample in range(0, samples, 3):
        if lengths[sample]:  # the target is in the history, too
            target[sample] = history[first[sample]]
    return SequenceBatch(
        sequences={
            "history": Jagged(history, lengths),
            "timestamps": Jagged(torch.arange(tokens), lengths),
        },
        dense={"target": target},
        weights={"next_item": (lengths > 0).float()},
        keys=torch.arange(samples),
    )


def evaluated(transport, placement):
    parallel = sharded(
        Retrieval(encoder(), num_items=ITEMS, table_device="meta"), transport, placement
    )
    parallel.tables.place()
    data = [
        rank_slice(retrieval_batch(seed, samples), transport.rank, transport.world)
        for seed, samples in BATCHES
    ]
    return evaluate_retrieval(parallel, data, popularity=POPULARITY.__getitem__)


def last_place(scores, target, left_out=()):
    """Rank of the target among the items that are not left out, the last of those that score
    alike."""
    kept = [score for item, score in enumerate(scores) if item == target or item not in left_out]
    return int(np.sum(np.array(kept) >= scores[target]))


def measure(ranks, kind=""):
    """By the definitions: a hit in the first k, its gain, the reciprocal rank."""
    ranks, found = np.array(ranks, dtype=float), {}
    for k in (1, 5, 10, 20, 50, 100, 200):
        found[f"hr@{k}{kind}"] = np.mean([1.0 if rank <= k else 0.0 for rank in ranks])
        gains = [1 / np.log2(1 + rank) if rank <= k else 0.0 for rank in ranks]
        found[f"ndcg@{k}{kind}"] = np.mean(gains)
    return found | {f"mrr{kind}": np.mean(1 / ranks)}


@pytest.fixture(scope="module")
def expected():
    parallel = sharded(
        Retrieval(encoder(), num_items=ITEMS, table_device="meta"), LocalTransport(), "sharded"
    )
    parallel.tables.place()
    ids, rows = parallel.tables.get_local_rows("item")
    table = rows[ids.argsort()]
    model = Retrieval(encoder(), num_items=ITEMS).double().eval()
    with torch.no_grad():
        model.item.weight.copy_(table)
        model.encoder.load_state_dict(parallel.module.encoder.state_dict())
    ranks = {who: ([], []) for who in ("model", "popularity")}  # among all, among unseen
    repeats, counts = [], []
    for seed, samples in BATCHES:
        batch = retrieval_batch(seed, samples)
        with torch.no_grad():
            scores = (model.encode_queries(batch) @ model.encode_items(table).T).numpy()
        history = batch.sequences["history"]
        past = [part.tolist() for part in history.values.split(history.lengths.tolist())]
        for row, target, items in zip(scores, batch.dense["target"].tolist(), past):
            if items:
                repeats.append(target in items)
                counts.append(POPULARITY[target].item())
                for who, values in (("model", row), ("popularity", POPULARITY.numpy())):
                    for kind, left_out in enumerate(((), items)):
                        ranks[who][kind].append(last_place(values, target, left_out))
    assert 0 < np.mean(repeats) < 1 and ranks["model"][0] != ranks["model"][1]
    found = {
        who: measure(every) | measure(unseen, "/unseen") for who, (every, unseen) in ranks.items()
    }
    found["model"]["repeats"] = np.mean(repeats)
    cold = np.array(counts) <= 5
    assert 0 < cold.mean() < 1
    found["model"] |= measure(np.array(ranks["model"][0])[cold], "/cold") | {"cold": cold.mean()}
    return found


def check(found, expected):
    assert found.keys() == expected.keys()
    for who, metrics in expected.items():
        assert found[who] == pytest.approx(metrics, rel=1e-14)


def test_one_process(expected):
    for placement in ("sharded", "replicated"):
        check(evaluated(LocalTransport(), placement), expected)


@pytest.mark.parametrize(("world", "placement"), [(2, "replicated"), (3, "sharded")])
def test_several_ranks(world, placement, expected):
    first, *others = run_ranks(world, evaluated, placement)
    check(first, expected)
    assert others == [first] * (world - 1)


ROWS = 13  # items with a row in a dynamic table: fewer than most k, and fewer than targets


def dynamic_model(transport, rows=ROWS):
    """Its table has rows for the items below `rows`."""
    model = Retrieval(encoder(), num_items=ITEMS, table_device="meta").double()
    parallel = freescale.parallelize(
        model,
        model.features,
        transport=transport,
        tables={"item": freescale.Dynamic(4096, negatives=())},
        seed=4,
    )
    parallel.tables.place()
    group = parallel.tables.get_group("item")
    keys = compute_keys(torch.arange(rows)).sort().values
    edges = group.layout.list_edges(torch.device("cpu")).tolist()
    first = edges[transport.rank - 1] if transport.rank else -(1 << 63)
    group.rows.resolve(keys[(keys >= first) & (keys < edges[transport.rank])], Ledger())
    group.rows.begin()
    return parallel


def dynamic_evaluated(transport, rows=ROWS):
    parallel = dynamic_model(transport, rows)
    data = [
        rank_slice(retrieval_batch(seed, samples), transport.rank, transport.world)
        for seed, samples in BATCHES
    ]
    counts = torch.arange(ITEMS) // 4  # the first ones do not occur in the training part
    kept = SampleRanks()
    found = evaluate_retrieval(parallel, data, popularity=lambda ids: counts[ids], keep=kept)
    return found, torch.cat(kept.ranks, 1)


def expect_dynamic(rows=ROWS):
    """Ranks of the model and of popularity among the items with a row, infinite without one."""
    parallel = dynamic_model(LocalTransport(), rows)
    ids, table = parallel.tables.get_local_rows("item")
    table = table[ids.argsort()]
    ranks = {who: ([], []) for who in ("model", "popularity")}
    for seed, samples in BATCHES:
        batch = retrieval_batch(seed, samples)
        with parallel.reading(batch) as read, torch.no_grad():
            parallel.module.eval()
            queries = parallel.module.encode_queries(read)
            scores = (queries @ parallel.module.encode_items(table).T).numpy()
        history = batch.sequences["history"]
        past = [part.tolist() for part in history.values.split(history.lengths.tolist())]
        for row, target, items in zip(scores, batch.dense["target"].tolist(), past):
            if items:
                counts = np.arange(rows) // 4
                for who, values in (("model", row), ("popularity", counts)):
                    there = target < rows and (who == "model" or counts[target] > 0)
                    for kind, left_out in enumerate(((), items)):
                        rank = last_place(values, target, left_out) if there else np.inf
                        ranks[who][kind].append(rank)
    return ranks


@pytest.mark.parametrize("world", [1, 3])
def test_a_target_without_a_row_is_a_miss(world):
    ranks = expect_dynamic()
    missed = np.isinf(ranks["model"][0])
    assert 0 < missed.sum() < len(missed)
    assert missed.sum() < np.isinf(ranks["popularity"][0]).sum() < len(missed)
    for found, kept in run_ranks(world, dynamic_evaluated):
        for who, (every, unseen) in ranks.items():
            expected = measure(every) | measure(unseen, "/unseen")
            if who == "model":  # no item has many events
                expected |= measure(every, "/cold") | {"cold": 1.0}
            found[who].pop("repeats", None)
            assert found[who] == pytest.approx(expected, rel=1e-14), who
        assert kept.tolist() == np.where(np.isinf(ranks["model"]), 0, ranks["model"]).tolist()


def test_an_empty_table_finds_nothing():
    found, ranks = dynamic_evaluated(LocalTransport(), rows=0)
    for who in ("model", "popularity"):
        for share in ("repeats", "cold"):
            found[who].pop(share, None)
        assert set(found[who].values()) == {0.0}, who
    assert ranks.numel() and not ranks.any()


def ranking_batch(seed, samples=6):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (samples,), generator=generator)
    counts = torch.randint(0, 4, (samples,), generator=generator)
    tokens, candidates = int(lengths.sum()), int(counts.sum())
    ids = torch.randint(0, ITEMS, (candidates,), generator=generator)
    return SequenceBatch(
        sequences={
            "history": Jagged(torch.randint(0, ITEMS, (tokens,), generator=generator), lengths),
            "timestamps": Jagged(torch.arange(tokens), lengths),
            "labels": Jagged(
                torch.randint(0, 2, (candidates, 2), generator=generator).float(), counts
            ),
        },
        candidates={"candidates": Nested(ids, torch.ones_like(ids), counts)},
        weights={"click": counts.float(), "like": counts.float()},
        keys=torch.arange(samples),
    )


def ranked(transport):
    model = Ranking(encoder(), num_items=ITEMS, tasks=("click", "like"), table_device="meta")
    parallel = sharded(model, transport, "sharded")
    parallel.tables.place()
    data = [rank_slice(ranking_batch(seed), transport.rank, transport.world) for seed in range(3)]
    return evaluate_ranking(parallel, data, ("click", "like"))


def test_ranking_metrics():
    one = ranked(LocalTransport())
    parallel = sharded(
        Ranking(encoder(), num_items=ITEMS, tasks=("click", "like"), table_device="meta"),
        LocalTransport(),
        "sharded",
    )
    parallel.tables.place()
    guesses, labels, users = [], [], []
    parallel.module.eval()
    for seed in range(3):
        batch = ranking_batch(seed)
        tables = parallel.tables
        tables.open(tables.set.fetch(tables.set.request([batch]), train=False))
        guesses.append(parallel.module.predict(batch).detach().float())
        labels.append(batch.sequences["labels"].values)
        users += batch.sequences["labels"].lengths.tolist()
    for column, task in enumerate(("click", "like")):
        guess, label = torch.cat(guesses)[:, column], torch.cat(labels)[:, column]
        assert one["model"][f"auc/{task}"] == pytest.approx(area_under_curve(guess, label))
        assert one["model"][f"ne/{task}"] == pytest.approx(normalized_entropy(guess, label))
        areas = [
            (area_under_curve(g, y), len(y))
            for g, y in zip(guess.split(users), label.split(users))
            if len(set(y.tolist())) == 2
        ]
        mean = sum(area * size for area, size in areas) / sum(size for _, size in areas)
        assert areas and one["model"][f"gauc/{task}"] == pytest.approx(mean)
    for several in run_ranks(2, ranked):
        assert several["model"] == pytest.approx(one["model"], rel=1e-6)
