"""The generator: its collision rate by plain sets, its distributions, its structure, and what it
refuses."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.loading import load_histories

from freescale.data import generate, prepare
from freescale.data.synthetic import draws

SMALL = {"users": 1100, "items": 5000, "median": 20, "cap": 200, "global_batch": 100}


def histories(path: Path) -> list[list[int]]:
    return pq.read_table(path, columns=["item_id"]).column("item_id").to_pylist()


def collision(users: list[list[int]], global_batch: int, ranks: int) -> float:
    """Plain sets: share of a batch's requests, distinct per rank, whose row the batch before reads
    on any rank."""
    hits = total = 0
    before: set[int] | None = None
    for first in range(0, len(users), global_batch):
        batch = users[first : first + global_batch]
        slices = [
            batch[len(batch) * r // ranks : len(batch) * (r + 1) // ranks] for r in range(ranks)
        ]
        requests = [{item for user in part for item in user} for part in slices]
        if before is not None:
            hits += sum(len(r & before) for r in requests)
            total += sum(map(len, requests))
        before = set().union(*requests)
    return hits / total


@pytest.mark.parametrize("target", [0.0, 0.12, 0.5, 0.9])
@pytest.mark.parametrize("ranks", [1, 4])
def test_collision_is_met(tmp_path, target, ranks):
    report = generate(tmp_path / "h.parquet", **SMALL, collision=target, ranks=ranks)
    measured = collision(histories(report.path), 100, ranks)
    assert abs(measured - target) <= 0.01
    assert report.measured_collision == pytest.approx(measured, abs=1e-12)
    if target == 0:
        assert measured == 0


@pytest.mark.parametrize("target", [0.03, 0.4, 0.97])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            {"users": 150, "items": 50, "median": 30, "global_batch": 10, "cap": 300},
            id="tiny catalogue",
        ),
        pytest.param(
            {"users": 60, "items": 100_000, "median": 8, "global_batch": 25, "cap": 300},
            id="three batches, the last short",
        ),
        pytest.param(
            {
                "users": 900,
                "items": 20_000,
                "lengths": "zipf",
                "global_batch": 64,
                "popularity": 0.0,
                "cap": 2000,
            },
            id="Zipf lengths, uniform items",
        ),
        pytest.param(
            {"users": 120, "items": 1001, "median": 5, "sigma": 0.0, "global_batch": 1},
            id="batches of one",
        ),
    ],
)
def test_collision_is_met_for_odd_shapes(tmp_path, target, shape):
    report = generate(tmp_path / "h.parquet", **shape, collision=target, ranks=2, seed=3)
    assert abs(collision(histories(report.path), shape["global_batch"], 2) - target) <= 0.01


@pytest.mark.parametrize("target", [0.12, 0.6])
def test_collision_is_met_over_the_file_where_the_first_batches_mislead(
    tmp_path, monkeypatch, target
):
    # two batches of heavy-tailed lengths say little about 25
    monkeypatch.setattr(draws, "_SAMPLE_EVENTS", 1)
    shape = {"users": 500, "items": 3000, "lengths": "zipf", "global_batch": 20, "cap": 2000}
    report = generate(tmp_path / "h.parquet", **shape, collision=target)
    assert abs(collision(histories(report.path), 20, 1) - target) <= 0.01


def test_no_control_reports_what_popularity_gives(tmp_path):
    report = generate(tmp_path / "h.parquet", **SMALL, ranks=2)
    assert report.measured_collision == pytest.approx(
        collision(histories(report.path), 100, 2), abs=1e-12
    )
    assert (
        generate(tmp_path / "one.parquet", users=5, items=9, global_batch=9).measured_collision
        is None
    )


def test_unreachable_collision_is_refused_and_leaves_nothing(tmp_path):
    for options, words in (
        ({"items": 1, "collision": 0.3}, "collision 0.3 is out of reach with 1 item: only 1.0 is"),
        ({"users": 100, "collision": 0.3}, "100 users are one of 100"),
        ({"collision": 1.3}, "collision is 1.3; it is a share"),
        # Batches of one user, most of them short: the one before cannot have read what a long one
        # asks for.
        (
            {"global_batch": 1, "users": 50, "sigma": 3.0, "collision": 0.99},
            ("collision 0.99 (is out of reach|was not)"),
        ),
    ):
        with pytest.raises(ValueError, match=words):
            generate(tmp_path / "h.parquet", **(SMALL | options))
        assert list(tmp_path.iterdir()) == []
    assert (
        generate(
            tmp_path / "h.parquet", **(SMALL | {"items": 1, "collision": 1.0})
        ).measured_collision
        == 1.0
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"users": 0}, "users is 0", id="0 users"),
        pytest.param({"cap": 1}, "cap is 1; it must be 2 or more", id="cap of 1"),
        pytest.param(
            {"lengths": "normal"},
            "lengths is 'normal'; choose lognormal or zipf",
            id="unknown lengths",
        ),
        pytest.param({"median": 0}, "median is 0", id="median of 0"),
        pytest.param(
            {"labels": ("like", "action")},
            "labels like, action: each needs a name of its own",
            id="label named as a column",
        ),
    ],
)
def test_bad_options(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        generate(tmp_path / "h.parquet", **(SMALL | options))


def test_file_is_prepared_ordered_and_deterministic(tmp_path):
    options = SMALL | {"actions": True, "labels": ("like", "share"), "collision": 0.2}
    shares = []
    first = generate(
        tmp_path / "a.parquet", **options, progress=lambda stage, share: shares.append(share)
    )
    generate(tmp_path / "b.parquet", **options)
    generate(tmp_path / "c.parquet", **options, seed=1)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert histories(tmp_path / "a.parquet") != histories(tmp_path / "c.parquet")
    assert shares[-1] == 1.0 and len(shares) == first.batches == 11
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.parquet", "c.parquet"]
    assert prepare(first.path, tmp_path / "cache") == first.path
    table = pq.read_table(first.path).to_pylist()
    assert [row["user_id"] for row in table] == list(range(1100))
    last = [row["timestamp"][-1] for row in table]
    assert last == sorted(last)
    assert sum(len(row["item_id"]) for row in table) == first.tokens
    for row in table:
        assert row["timestamp"] == sorted(row["timestamp"])
        bits = zip(row["action"], row["like"], row["share"], strict=True)
        assert row["action"] == [
            action & 1 | like << 1 | share << 2 for action, like, share in bits
        ]
    loader = load_histories(
        first.path, 100, task="ranking", tasks=("like", "share"), shuffle=False, rank=1, world=2
    )
    assert loader.num_items == 5000 and loader.num_samples == 1100
    assert sum(len(batch.check()) for batch in loader) == 550


def test_lengths(tmp_path):
    report = generate(
        tmp_path / "l.parquet", users=20_000, items=100, median=12, sigma=1.0, cap=500
    )
    lengths = np.array([len(h) for h in histories(report.path)])
    assert lengths.min() == 2 and lengths.max() <= 500
    assert np.median(lengths) == pytest.approx(12, abs=1)
    assert np.quantile(lengths, 0.9) == pytest.approx(12 * np.exp(1.2816), rel=0.05)
    quantiles = {
        f"p{q}": np.quantile(lengths, q / 100, method="inverted_cdf") for q in (50, 90, 99)
    }
    assert report.lengths == quantiles | {"max": lengths.max()}
    report = generate(
        tmp_path / "z.parquet", users=20_000, items=100, lengths="zipf", zipf_exponent=1.5, cap=500
    )
    counts = Counter(len(h) for h in histories(report.path))
    assert min(counts) == 2 and max(counts) <= 500
    for length in (3, 4, 8):
        assert counts[length] / counts[2] == pytest.approx((length / 2) ** -1.5, rel=0.12)


@pytest.mark.parametrize("collision_rate", [None, 0.3])
def test_popularity_is_zipf(tmp_path, collision_rate):
    report = generate(
        tmp_path / "h.parquet",
        **(SMALL | {"users": 4000}),
        popularity=1.0,
        collision=collision_rate,
    )
    counts = Counter(item for h in histories(report.path) for item in h)
    ranked = np.array([c for _, c in counts.most_common(512)], float)
    # Pairs of adjacent popularity share their mass; over pairs the law is the same with and without
    # control.
    mass = 1 / np.arange(1, 5001)
    for first, last in ((0, 2), (2, 8), (8, 64), (64, 512)):
        assert ranked[first:last].sum() / report.tokens == pytest.approx(
            mass[first:last].sum() / mass.sum(), rel=0.15
        )


def test_next_item_can_be_learned(tmp_path):
    """A table of follow-ups per previous item, counted on half of the users, beats popularity on
    the other half."""
    report = generate(
        tmp_path / "h.parquet", users=3000, items=500, median=30, collision=0.4, global_batch=300
    )
    users = histories(report.path)
    popular = Counter(item for h in users[0::2] for item in h).most_common(10)
    best = {item for item, _ in popular}
    following: dict[int, Counter] = defaultdict(Counter)
    for h in users[0::2]:
        for a, b in zip(h[:-1], h[1:], strict=True):
            following[a][b] += 1
    top = {a: {item for item, _ in c.most_common(10)} for a, c in following.items()}
    pairs = [(a, b) for h in users[1::2] for a, b in zip(h[:-1], h[1:], strict=True)]
    by_popularity = sum(b in best for _, b in pairs) / len(pairs)
    by_previous = sum(b in top.get(a, best) for a, b in pairs) / len(pairs)
    assert by_previous > 1.3 * by_popularity, (by_previous, by_popularity)


def test_labels_can_be_learned(tmp_path):
    """The mean label of an item, counted on half of the users, ranks the labels of the other
    half."""
    report = generate(tmp_path / "h.parquet", users=2000, items=50, median=30, labels=("like",))
    table = pq.read_table(report.path)
    items, likes = table.column("item_id").to_pylist(), table.column("like").to_pylist()
    shown, liked = np.zeros(50), np.zeros(50)
    for h, labels in zip(items[0::2], likes[0::2], strict=True):
        np.add.at(shown, h, 1)
        np.add.at(liked, h, labels)
    rate = liked / np.maximum(shown, 1)
    guess = [rate[i] for h in items[1::2] for i in h]
    truth = np.array([label for labels in likes[1::2] for label in labels])
    right = ((np.array(guess) > 0.5) == truth).mean()
    assert right > max(truth.mean(), 1 - truth.mean()) + 0.1
