"""From a trained run to recommendations: `freescale.load`, `freescale recommend`, exports."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from helpers.command import freescale
from helpers.small_runs import SMALL

import freescale as library
from freescale.cli import demo
from freescale.recommend import job
from freescale.recommend.approximate import ApproximateIndex
from freescale.recommend.export import export_run
from freescale.recommend.recommender import Recommender
from freescale.recommend.requests import make_batch
from freescale.stores.runs import find_checkpoints
from freescale.train.export import read_weights
from freescale.train.state.intact import find_checkpoint
from freescale.transport.local import LocalTransport

USERS, ITEMS, EVENTS = 60, 50, 900
DAY = 86_400


def write_sales(folder: Path) -> list[object]:
    """Events with text ids, and files of attributes. Returns the options that name them."""
    random = np.random.default_rng(0)
    items = random.integers(0, ITEMS, EVENTS)
    sales = pa.table(
        {
            "customer": [f"c{user:02d}" for user in random.integers(0, USERS, EVENTS)],
            "sku": [f"s{item:02d}" for item in items],
            "timestamp": 1_700_000_000 + DAY * np.arange(EVENTS),
            "channel": random.choice(["web", "shop"], EVENTS),
            "device": random.choice(["phone", "desk"], EVENTS),
        }
    )
    catalogue = pa.table(
        {
            "sku": [f"s{item:02d}" for item in range(ITEMS + 3)],  # three of them are new
            "category": [f"k{item % 4}" for item in range(ITEMS + 3)],
            "price": random.random(ITEMS + 3) * 100,
        }
    )
    people = pa.table(
        {
            "customer": [f"c{user:02d}" for user in range(USERS)],
            "age": random.integers(18, 80, USERS),
        }
    )
    for name, table in (("sales", sales), ("items", catalogue), ("users", people)):
        pyarrow.csv.write_csv(table, folder / f"{name}.csv")
    files = {name: folder / f"{name}.csv" for name in ("sales", "items", "users")}
    features = "category,price,age,channel,context.device"
    return ["--data", files["sales"], "--items", files["items"], "--users", files["users"],
            "--features", features]  # fmt: skip


def train_run(folder: Path, *options: object) -> Path:
    command = ["--folder", folder / "run", "--cache", folder / "cache", *SMALL]
    done = freescale("train", *options, *command, "--epochs", 2)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> Path:
    """A run with every kind of feature, text ids and both biases."""
    folder = tmp_path_factory.mktemp("described")
    return train_run(folder, *write_sales(folder))


@pytest.fixture(scope="module")
def recommender(described) -> Recommender:
    return library.load(described)


def read_sales(run: Path) -> dict[str, list[dict[str, object]]]:
    """The events of each user, in order of time."""
    found: dict[str, list[dict[str, object]]] = {}
    for row in pyarrow.csv.read_csv(run.parent / "sales.csv").to_pylist():
        found.setdefault(row["customer"], []).append(row)
    return found


def test_recommends_what_evaluation_ranks(described, tmp_path):
    """Every target at place r of `eval` is at place r of `recommend`, among all items and among the
    unseen ones (histories fit)."""
    ranks, found = tmp_path / "ranks.csv", {}
    done = freescale("eval", described, "--ranks", ranks, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    for name, more in (("rank", []), ("rank_unseen", ["--exclude-seen"])):
        out = tmp_path / f"{name}.parquet"
        done = freescale("recommend", described, "--out", out, "--before", "test", "--k", 15, *more)
        assert done.returncode == 0, done.stderr
        rows = pq.read_table(out).to_pylist()
        found[name] = {(row["user"], row["place"]): row["item"] for row in rows}
    compared = 0
    targets = {user: events[-1]["sku"] for user, events in read_sales(described).items()}
    for row in csv.DictReader(ranks.open()):
        user, seen = row["user_id"], row["rank"] != row["rank_unseen"]
        assert row["item_id"] == targets[user]
        history = [event["sku"] for event in read_sales(described)[user][:-1]]
        for name, places in found.items():
            if name == "rank_unseen" and row["item_id"] in history:
                continue  # a target is ranked even if it was seen
            if int(row[name]) <= 15:
                assert places[user, int(row[name])] == row["item_id"], (row, seen)
                compared += 1
    assert compared > 20


def test_the_model_is_the_trainer_s(described, recommender, tmp_path):
    """Scores from a list, a table, known users and an export are the same."""
    events = read_sales(described)
    names = sorted(events)[:20]
    given = [[{**e, "item": e["sku"]} for e in events[name]] for name in names]
    ages = {
        r["customer"]: r for r in pyarrow.csv.read_csv(described.parent / "users.csv").to_pylist()
    }
    people = [ages[name] for name in names]
    known = recommender.encode(users=names)
    torch.testing.assert_close(recommender.encode(given, attributes=people), known)
    table = pyarrow.csv.read_csv(described.parent / "sales.csv")
    mixed = table.take(np.random.default_rng(1).permutation(len(table)))  # put in order of time
    requests = recommender.read(mixed)
    order = [requests.users.index(name) for name in names]
    table_people = [ages[name] for name in requests.users]
    of_table = recommender.encode(mixed, attributes=table_people)[order]
    torch.testing.assert_close(of_table, known)
    out = described.parent / "export"
    done = freescale("export", described, "--out", out, "--overwrite")
    assert done.returncode == 0, done.stderr
    moved = library.load(out)
    assert moved.items.ids == recommender.items.ids
    assert torch.equal(
        moved.encode(given, attributes=people), recommender.encode(given, attributes=people)
    )
    assert torch.equal(moved.item_vectors(), recommender.item_vectors())
    with pytest.raises(ValueError, match="knows no users: give their histories"):
        moved.recommend(users=names)
    with pytest.raises(ValueError, match="an export already"):
        list(export_run(out, tmp_path))


def test_every_feature_counts(described, recommender):
    """What describes the user, the event and the request changes the query."""
    history = [[("s01", 1_700_000_000), ("s02", 1_700_000_000 + DAY)]]
    plain = recommender.encode(history)
    shop = [[{"item": i, "time": t, "channel": "shop"} for i, t in history[0]]]
    assert not torch.equal(recommender.encode(shop), plain)
    assert not torch.equal(recommender.encode(history, attributes=[{"age": 30}]), plain)
    assert not torch.equal(recommender.encode(history, context=[{"device": "phone"}]), plain)
    assert torch.equal(recommender.encode(history, context=[{}]), plain)


def test_times_may_be_dates(recommender):
    from datetime import UTC, datetime

    seconds = [1_700_000_000, 1_700_000_000 + 5 * DAY]
    dates = [datetime.fromtimestamp(each, UTC) for each in seconds]
    texts = [date.isoformat() for date in dates]
    expected = recommender.encode([list(zip(["s01", "s02"], seconds))])
    for times in (dates, texts):
        assert torch.equal(recommender.encode([list(zip(["s01", "s02"], times))]), expected)


def test_new_items_and_unknown_ones(recommender):
    """Items of --items without an event can be recommended; ids that nothing names cannot."""
    assert {"s50", "s51", "s52"} <= set(recommender.items.ids.to_pylist())
    found = recommender.recommend([[("s01", 1_700_000_000), ("nothing", 1_700_000_001)]], k=1000)
    assert found.unknown == 1 and len(found.items[0]) == ITEMS + 3
    assert sorted(found.items[0]) == sorted(recommender.items.ids.to_pylist())
    (scores,) = recommender.score([[("s01", 1_700_000_000)]], ["s01", "nothing", "s51"])
    assert np.isnan(scores).tolist() == [False, True, False]
    assert found.scores[0] == sorted(found.scores[0], reverse=True)
    best = dict(zip(found.items[0], found.scores[0]))
    assert scores[2] == pytest.approx(best["s51"], abs=1e-6)


def test_the_whole_history_is_left_out(recommender):
    """Also what the model does not read, of a history longer than it can."""
    events = [(f"s{n % 40:02d}", 1_700_000_000 + n) for n in range(80)]
    found = recommender.recommend([events], k=100, exclude_seen=True)
    assert len(events) > recommender.max_length
    assert set(found.items[0]) == {f"s{n:02d}" for n in range(40, ITEMS + 3)}
    some = recommender.recommend([events], k=3, exclude_seen=True, candidates=["s01", "s45", "x"])
    assert some.items == [["s45"]]


def test_a_user_without_a_history_gets_popular_items(described, recommender):
    counts = dict(zip(recommender.items.ids.to_pylist(), recommender.items.events.tolist()))
    trained: dict[str, int] = {}
    for events in read_sales(described).values():
        for event in events[:-2]:  # of the training part
            trained[event["sku"]] = trained.get(event["sku"], 0) + 1
    assert {item: count for item, count in counts.items() if count} == trained
    found = recommender.recommend([[], [("s01", 1_700_000_000)]], k=5)
    places = [counts[item] for item in found.items[0]]
    assert places == sorted(counts.values(), reverse=True)[:5]
    assert found.scores[0] == [None] * 5 and None not in found.scores[1]
    table = found.to_table()
    assert table.column("place").to_pylist() == [1, 2, 3, 4, 5] * 2
    assert table.column("score").null_count == 5 and table.column("user").to_pylist()[-1] == 1


@pytest.mark.parametrize(
    "given, match",
    [
        ({"histories": [["s01"]]}, r"reads the time of each event: give \(item, time\)"),
        ({"histories": [[("s01", 1, 2, 3)]]}, r"histories\[0\]\[0\] is \('s01', 1, 2, 3\)"),
        ({"histories": [[None]]}, r"histories\[0\]\[0\] is None"),
        ({"histories": ["s01"]}, r"histories\[0\] is 's01': give a list of events"),
        ({"histories": [[("s01", 1_700_000_000_000)]]}, "milliseconds.*trained with s since 1970"),
        ({"histories": [[("s01", "soon")]]}, "time: .*'soon'"),
        ({"histories": [[{"time": 5}]]}, "events have no item"),
        ({"histories": [[]], "k": 0}, "k is 0; it must be 1 or more"),
        ({"histories": [[]], "candidates": ["x"]}, "no item is left"),
        ({"histories": [[]], "attributes": [{}, {}]}, "users has 2 entries for 1 histories"),
        ({"users": ["c00", "nobody"]}, "user 'nobody' is not in the run's data"),
        ({}, "give histories, or users"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(recommender, given, match):
    with pytest.raises(ValueError, match=match):
        recommender.recommend(**given)


def test_filters_and_formats(described, tmp_path):
    people = tmp_path / "people.txt"
    people.write_text("c03\nc01\nc03\n")
    wanted = {f"s{item:02d}" for item in range(ITEMS + 3) if item % 4 in (1, 2)}
    found = {}
    for suffix in ("parquet", "csv", "jsonl"):
        out = tmp_path / f"recs.{suffix}"
        done = freescale("recommend", described, "--out", out, "--users", people, "--k", 4,
                         "--filter", "category=k1|k2")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{out}: 8 recommendations for 2 users\n"
        if suffix == "jsonl":
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            found[suffix] = [
                (line["user"], place, item, score)
                for line in lines
                for place, (item, score) in enumerate(zip(line["items"], line["scores"]), 1)
            ]
        else:
            table = pq.read_table(out) if suffix == "parquet" else pyarrow.csv.read_csv(out)
            found[suffix] = [tuple(row.values()) for row in table.to_pylist()]
    assert [row[:2] for row in found["csv"]] == [
        (u, p) for u in ("c01", "c03") for p in range(1, 5)
    ]
    assert {row[2] for row in found["csv"]} <= wanted
    for rows in found.values():
        assert [row[:3] for row in rows] == [row[:3] for row in found["parquet"]]
        expected = [row[3] for row in found["parquet"]]
        assert [row[3] for row in rows] == pytest.approx(expected, abs=1e-6)
    for more, word in (
        (["--filter", "price=3"], "'price' is a numeric feature"),
        (["--filter", "color=red"], "the model has categories of items: category"),
        (["--filter", "category=k9"], "'category' is never 'k9'"),
        (["--filter", "category"], "write FEATURE=VALUE"),
        (["--users", tmp_path / "none.txt"], "none.txt: No such file"),
    ):
        done = freescale("recommend", described, "--out", tmp_path / "x.csv", *more)
        assert done.returncode == 1 and word in done.stderr, done.stderr
    done = freescale("recommend", described, "--out", tmp_path / "x.txt")
    assert done.returncode == 1 and "end its name with one of .parquet" in done.stderr


def test_ranks_share_the_users_and_a_stopped_job_continues(described, tmp_path, monkeypatch):
    one, many = tmp_path / "one.parquet", tmp_path / "many.parquet"
    assert freescale("recommend", described, "--out", one).returncode == 0
    monkeypatch.setattr(job, "_CHUNK", 7)
    write, written = pq.write_table, []

    def stop_at_the_fourth(table, path):
        written.append(path)
        if len(written) == 4:
            raise KeyboardInterrupt
        write(table, path)

    monkeypatch.setattr(job.pq, "write_table", stop_at_the_fourth)
    parts = many.with_name("many.parquet.parts")
    with pytest.raises(KeyboardInterrupt):
        run_here(described, many)
    assert len(list(parts.glob("*.parquet"))) == 3
    monkeypatch.setattr(job.pq, "write_table", write)
    lines = run_here(described, many)
    assert lines[1] == "3 of 9 chunks were there from a job that was stopped"
    assert not parts.exists() and pq.read_table(many).equals(pq.read_table(one))
    other = tmp_path / "other.parquet"
    done = freescale("recommend", described, "--out", other, "--nproc", 2, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert pq.read_table(other).equals(pq.read_table(one))
    users = pq.read_table(one).column("user").to_pylist()
    assert users == sorted(users)


def run_here(run: Path, out: Path) -> list[str]:
    recommender = library.load(run)
    return job.run_job(job.Job(out), recommender, LocalTransport(), lambda stage, share: None)


def test_a_job_with_other_options_starts_anew(described, tmp_path):
    out = tmp_path / "recs.csv"
    parts = tmp_path / "recs.csv.parts"
    parts.mkdir()
    (parts / "job.json").write_text('"another"')
    (parts / "00000000.parquet").write_bytes(b"of another job")
    done = freescale("recommend", described, "--out", out)
    assert done.returncode == 0 and "chunks were there" not in done.stdout, done.stderr
    assert not parts.exists() and len(out.read_text().splitlines()) == 1 + 10 * USERS


def test_approximate_search(described, recommender, tmp_path):
    """Its recall is measured and printed; less than the floor is refused; seen items are left
    out."""
    out = tmp_path / "out"
    done = freescale("export", described, "--out", out, "--index", "--min-recall", 0.9)
    assert done.returncode == 0, done.stderr
    measured = json.loads((out / "index.json").read_text())
    assert measured["recall@10"] >= 0.9 and measured["items"] == ITEMS + 3
    share = f"finds {measured['recall@10']:.1%} of the exact ten best items of 60 users"
    assert share in done.stdout
    found = library.load(out)
    events = [[(f"s{n:02d}", 1_700_000_000 + n) for n in range(5)], []]
    exact = found.recommend(events, k=10)
    near = found.recommend(events, k=10, approximate=True)
    same = set(exact.items[0]) & set(near.items[0])
    assert len(same) >= 8 and near.items[1] == exact.items[1]
    scores = dict(zip(exact.items[0], exact.scores[0]))
    for item, score in zip(near.items[0], near.scores[0]):
        assert item not in scores or score == pytest.approx(scores[item], abs=1e-5)
    unseen = found.recommend(events, k=50, exclude_seen=True, approximate=True).items[0]
    assert not {f"s{n:02d}" for n in range(5)} & set(unseen) and len(unseen) > 40
    with pytest.raises(ValueError, match="candidates are searched exactly"):
        found.recommend(events, candidates=["s01"], approximate=True)
    with pytest.raises(ValueError, match="has no index for approximate search"):
        recommender.recommend(events, approximate=True)
    random = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="of the best ten items, less than the floor of 150.0%"):
        ApproximateIndex.build(random, random[:10], 1.5)


def test_a_ranking_model_scores(tmp_path):
    from freescale.data.synthetic.generate import generate

    data = tmp_path / "data.parquet"
    generate(data, users=40, items=100, median=10, cap=20, labels=["click", "like"])
    run = train_run(tmp_path, "--data", data, "--task", "ranking", "--labels", "click,like")
    found = library.load(run)
    events = [(1, 10), (2, 20), (3, 30)]
    if found.module.action is not None:
        events = [(*event, 0) for event in events]
    one, other = found.score([events, events[:1]], [5, 6, 10**6])
    assert one.shape == other.shape == (3, 2)
    assert np.isnan(one[2]).all() and ((one[:2] > 0) & (one[:2] < 1)).all()
    (alone,) = found.score([events], [[6]])
    np.testing.assert_allclose(alone[0], one[1], atol=1e-6)
    (later,) = found.score([events], [6], at=[10**6])
    assert not np.array_equal(later, alone)
    with pytest.raises(ValueError, match="is a ranking model, which has no recommend"):
        found.recommend([events])


def test_a_dynamic_table(tmp_path):
    """Items are hashed texts; one without a row is a position of its own, and never recommended."""
    random = np.random.default_rng(0)
    sales = pa.table(
        {
            "user": random.integers(0, 30, 600),
            "item": [f"s{item}" for item in random.integers(0, 40, 600)],
            "time": np.arange(600),
        }
    )
    pyarrow.csv.write_csv(sales, tmp_path / "sales.csv")
    run = train_run(tmp_path, "--data", tmp_path / "sales.csv", "--rows", "item=dynamic:1000")
    found = library.load(run)
    assert set(found.items.ids.to_pylist()) <= {f"s{item}" for item in range(40)}
    best = found.recommend([[("s1", 1), ("new", 2), ("s2", 3)]], k=100)
    assert sorted(best.items[0]) == sorted(found.items.ids.to_pylist())
    assert not torch.equal(
        found.encode([[("s1", 1), ("new", 2), ("s2", 3)]]), found.encode([[("s1", 1), ("s2", 3)]])
    )
    done = freescale("export", run, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    again = library.load(tmp_path / "out").recommend([[("s1", 1), ("new", 2), ("s2", 3)]], k=100)
    assert again == best


def test_a_dynamic_table_of_actions(tmp_path):
    """An event has the row of its action; unknown ones are refused."""
    random = np.random.default_rng(0)
    columns = {"user": random.integers(0, 30, 600), "item": random.integers(0, 40, 600)}
    columns |= {"time": np.arange(600), "action": random.choice([1, 4], 600)}
    pyarrow.csv.write_csv(pa.table(columns), tmp_path / "sales.csv")
    rows = ("--rows", "item=dynamic:1000,action=dynamic:8")
    run = train_run(tmp_path, "--data", tmp_path / "sales.csv", *rows)
    found = library.load(run)
    table = dict(read_weights(find_checkpoint(find_checkpoints(run), None, LocalTransport())))
    ids, trained = (table["table.action"][name] for name in ("ids", "weight"))
    assert sorted(ids.tolist()) == [1, 4]
    for action, row in zip(ids.tolist(), trained, strict=True):
        assert torch.equal(found.module.action.weight[action], row.float())
    one, other = (found.encode([[(3, 1, action)]]) for action in (1, 4))
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="action 9 is unknown"):
        found.encode([[(3, 1, 9)]])


def test_the_demonstration_ends_with_recommendations(described, capfd):
    demo.print_recommendations(described)
    said = capfd.readouterr().out
    assert "ten items for user c" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("│")] == [
        str(place) for place in range(1, 11)
    ]


def test_a_run_without_its_data(tmp_path, described):
    from shutil import copytree

    moved = copytree(described, tmp_path / "run")
    config = (moved / "config.json").read_text()
    (moved / "config.json").write_text(config.replace("sales.csv", "gone.csv"))
    with pytest.raises(ValueError, match="gone.csv.*use an export of the run, which needs none"):
        library.load(moved)
    where = str(described.parent / "sales.csv")
    assert len(library.load(moved, data=where).items) == ITEMS + 3
    with pytest.raises(ValueError, match="holds no checkpoint and no export"):
        library.load(tmp_path)


def read_snippets(page: str) -> list[str]:
    path = Path(__file__).parents[2] / "docs" / "guide" / page
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_about_recommending_runs(described, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "all").symlink_to(described)
    monkeypatch.chdir(tmp_path)
    first, histories = read_snippets("recommend.md")
    names = {"table": pyarrow.csv.read_csv(described.parent / "sales.csv")}
    exec(compile(first, "recommend.md", "exec"), names)
    assert len(names["found"].items) == 2 and names["found"].to_table().num_rows == 20
    ordered, *rest = [line for line in histories.splitlines() if not line.startswith("#")]
    assert len(rest) == 3
    for line in rest:
        assert len(eval(line, names).items[0]) == 10
    options = ["--data", described.parent / "sales.csv", "--encoder", "sasrec"]
    assert len(eval(ordered, {"model": library.load(train_run(tmp_path, *options))}).items) == 1


def test_the_page_about_serving_runs(described, recommender):
    (snippet,) = read_snippets("serve.md")
    histories = [[(f"s{n:02d}", 1_700_000_000 + n) for n in range(5)] for _ in range(2)]
    start, new, whole = (
        recommender.read([events[part] for events in histories])
        for part in (slice(4), slice(4, 5), slice(5))
    )
    names = {"model": recommender, "batch": make_batch(start, 0, 2, 20)}
    names["new_events"] = make_batch(new, 0, 2, 20)
    exec(compile(snippet, "serve.md", "exec"), names)
    torch.testing.assert_close(names["queries"], recommender.encode_requests(whole))
