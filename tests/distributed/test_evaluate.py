"""Full-catalogue evaluation on several ranks against sorting all scores in one process."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.toys import rank_slice

import freescale
from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.train.evaluate import evaluate_ranking, evaluate_retrieval
from freescale.train.metrics import area_under_curve, normalized_entropy, ranking_quality
from freescale.transport.local import LocalTransport

ITEMS = 37
POPULARITY = (1 << 53) + torch.arange(ITEMS) // 4  # ties, and counts that no float tells apart


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
    lengths = torch.randint(0, 6, (samples,), generator=generator)
    tokens = int(lengths.sum())
    return SequenceBatch(
        sequences={
            "history": Jagged(torch.randint(0, ITEMS, (tokens,), generator=generator), lengths),
            "timestamps": Jagged(torch.arange(tokens), lengths),
        },
        dense={"target": torch.randint(0, ITEMS, (samples,), generator=generator)},
        weights={"next_item": (lengths > 0).float()},
        keys=torch.arange(samples),
    )


def evaluated(transport, placement):
    parallel = sharded(
        Retrieval(encoder(), num_items=ITEMS, table_device="meta"), transport, placement
    )
    parallel.tables.place()
    popularity = POPULARITY
    data = [
        rank_slice(retrieval_batch(seed, samples), transport.rank, transport.world)
        for seed, samples in ((0, 7), (1, 2))
    ]
    return evaluate_retrieval(parallel, data, popularity=popularity)


def last_place(scores, target):
    """Rank of the target in the sorted catalogue, the last of those that score alike."""
    return max(
        place
        for place, score in enumerate(sorted(scores, reverse=True), start=1)
        if score == scores[target]
    )


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
    ranks, popular = [], []
    for seed, samples in ((0, 7), (1, 2)):
        batch = retrieval_batch(seed, samples)
        with torch.no_grad():
            scores = model.encode_queries(batch) @ model.encode_items(table).T
        for row, target, weight in zip(
            scores, batch.dense["target"].tolist(), batch.weights["next_item"].tolist()
        ):
            if weight:
                ranks.append(last_place(row.tolist(), target))
                popular.append(last_place(POPULARITY.tolist(), target))
    return {
        "model": ranking_quality(torch.tensor(ranks)),
        "popularity": ranking_quality(torch.tensor(popular)),
    }


def test_one_process(expected):
    for placement in ("sharded", "replicated"):
        assert evaluated(LocalTransport(), placement) == expected


@pytest.mark.parametrize(("world", "placement"), [(2, "replicated"), (3, "sharded")])
def test_several_ranks(world, placement, expected):
    assert run_ranks(world, evaluated, placement) == [expected] * world


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
    guesses, labels = [], []
    parallel.module.eval()
    for seed in range(3):
        batch = ranking_batch(seed)
        parallel.tables.fetch(parallel.tables.request([batch]), train=False)
        guesses.append(parallel.module.predict(batch).detach().float())
        labels.append(batch.sequences["labels"].values)
    for column, task in enumerate(("click", "like")):
        guess, label = torch.cat(guesses)[:, column], torch.cat(labels)[:, column]
        assert one["model"][f"auc/{task}"] == pytest.approx(area_under_curve(guess, label))
        assert one["model"][f"ne/{task}"] == pytest.approx(normalized_entropy(guess, label))
    for several in run_ranks(2, ranked):
        assert several["model"] == pytest.approx(one["model"], rel=1e-6)
