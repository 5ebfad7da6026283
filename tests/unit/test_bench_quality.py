"""`freescale bench quality`: its statistics against plain computations, its runs on a small file,
and the ranks of users that `freescale eval` writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from freescale_bench.common.jobs import Job, run_jobs
from freescale_bench.common.results import Destination
from freescale_bench.quality import bench, peer
from freescale_bench.quality.bench import Plan, bench_quality, compare
from freescale_bench.quality.intervals import bootstrap_relative, find_student, summarize
from freescale_bench.quality.peer import PeerRun, read_figures, read_run, write_interactions
from freescale_bench.quality.seed import Seed, train_seed
from freescale_bench.quality.table import format_recipes
from freescale_bench.quality.together import bench_together

USERS, ITEMS, LONGEST = 9, 30, 6
TINY = ["width=8", "layers=1", "heads=1", "epochs=1", "negatives=3", f"max_length={LONGEST}"]


def events_of(user):
    """Events of a user: 2 for user 0, which has nothing to train on, up to 10."""
    return 2 + user


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Interactions whose users, by their last event, are not in the order of their numbers."""
    random = np.random.default_rng(0)
    users = np.concatenate([np.full(events_of(user), 100 + user) for user in range(USERS)])
    items = random.integers(1, ITEMS, len(users))
    times = random.integers(0, 10**6, len(users))
    path = tmp_path_factory.mktemp("data") / "events.parquet"
    pq.write_table(pa.table({"user_id": users, "item_id": items, "timestamp": times}), path)
    return path


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory):
    """A result of two seeds beside a peer's figures, its plan, and the seeds that each of two calls
    trained."""
    folder = tmp_path_factory.mktemp("quality")
    figures = folder / "peer.json"
    one = {
        "filtered": {"hr@10": 0.5, "ndcg@10": 0.25},
        "unfiltered": {"hr@10": 0.4, "ndcg@10": 0.2},
    }
    figures.write_text(json.dumps([one, one]))
    plan = Plan(
        data=str(data), name="events", recipe="sasrec", changes=TINY, seeds=2,
        run_folder=folder / "runs", device="cpu", peer_figures=figures,
    )  # fmt: skip
    calls = []

    def in_process(jobs, at_a_time):
        calls.append([job.name for job in jobs])
        for job in jobs:
            train_seed(Seed(**json.loads(Path(job.command[-1]).read_text())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "run_jobs", in_process)
        for _ in range(2):
            bench_quality(plan, Destination(folder / "results", "abc"))
    (path,) = (folder / "results").glob("*.json")
    return path, plan, calls


def test_finished_seeds_are_not_trained_again(measured):
    _, plan, calls = measured
    assert calls == [["sasrec, seed 0", "sasrec, seed 1"], []]
    (other, _) = Plan(**vars(plan) | {"changes": [*TINY, "lr=0.5"]}).list_seeds()
    with pytest.raises(ValueError, match="seed-0 has a run with other settings"):
        other.find_result()


def test_a_seed_of_before_a_setting_existed_is_found(measured):
    _, plan, _ = measured
    seed = plan.list_seeds()[0]
    path = Path(seed.folder) / "quality.json"
    text = path.read_text()
    old = json.loads(text)
    assert 0 <= old["validation"]["hr@10/unseen"] <= 1
    del old["config"]["train"]["snapshot_every"], old["config"]["train"]["full_every"]
    path.write_text(json.dumps(old))
    assert seed.find_result() == old
    path.write_text(text)


def test_ranks_of_users_give_the_metrics_of_the_evaluation(measured, data):
    """User by user: whose history has how many events is known, each user has another number."""
    _, plan, _ = measured
    for seed in plan.list_seeds():
        ranks = np.loadtxt(Path(seed.folder) / "ranks.csv", delimiter=",", skiprows=1, dtype=int)
        histories = {user: min(LONGEST, events_of(user - 100) - 1) for user in ranks[:, 0]}
        assert len(histories) == USERS and all(h == histories[u] for u, h, *_ in ranks)
        quality = json.loads((Path(seed.folder) / "quality.json").read_text())["quality"]["model"]
        for column, kind in ((2, ""), (3, "/unseen")):
            assert quality[f"mrr{kind}"] == pytest.approx((1 / ranks[:, column]).mean())
        assert (ranks[:, 3] <= ranks[:, 2]).all() and ranks[:, 2].max() <= ITEMS


def test_a_result_says_what_was_measured(measured):
    path, plan, _ = measured
    result = json.loads(path.read_text())
    assert path.name == "quality-sasrec-events-cpu.json"
    ours, popularity, theirs = result["rows"]
    assert (ours["arm"], popularity["arm"], theirs["arm"]) == ("sasrec", "popularity", bench.PEER)
    assert (ours["seeds"], ours["users"], theirs["seeds"]) == (2, USERS - 2, 2)
    # by hand, of users with a history of three events or more
    values = []
    for seed in plan.list_seeds():
        ranks = np.loadtxt(Path(seed.folder) / "ranks.csv", delimiter=",", skiprows=1)
        values.append((ranks[ranks[:, 1] >= 3][:, 3] <= 10).mean())
    assert ours["hr@10/unseen"]["values"] == pytest.approx(values)
    expected = 100 * (np.mean(values) / 0.5 - 1)
    assert result["comparison"]["hr@10/unseen"] == {"percent": pytest.approx(expected)}
    assert [c["asked"] for c in result["claims"]] == [-3, -3, 0]
    assert result["claims"][0]["measured"] == pytest.approx(expected, abs=1e-4)
    assert result["dataset"]["sha256"] and str(plan.folder) not in path.read_text()
    text = format_recipes({path.stem: result}, "results")
    assert "| events | sasrec |" in text and "hr@10/unseen" in text


def test_intervals():
    known = {1: 12.706, 4: 2.776, 10: 2.228, 11: 2.201, 30: 2.042, 1000: 1.962}
    assert {n: find_student(n) for n in known} == pytest.approx(known, abs=0.003)
    found = summarize([1.0, 2.0, 3.0])
    half = 4.303 * 1.0 / 3**0.5
    assert found["mean"] == 2 and found["high"] - 2 == 2 - found["low"] == pytest.approx(half)
    assert summarize([0.5]) == {"mean": 0.5, "values": [0.5]}


def test_bootstrap_draws_both_models_values_of_a_user_together():
    random = np.random.default_rng(0)
    theirs = random.random(400)
    same = bootstrap_relative(1.1 * theirs, theirs, resamples=50)
    assert [same[name] for name in ("percent", "low", "high")] == pytest.approx([10] * 3)
    assert same["users"] == 400
    apart = bootstrap_relative(1.1 * random.permutation(theirs), theirs, resamples=200)
    # of two independent means of 400 values between 0 and 1
    expected = 2 * 1.96 * 100 * 1.1 * (2 / 12 / 400) ** 0.5 / 0.5
    assert (
        apart["percent"] == pytest.approx(10)
        and 0.7 < (apart["high"] - apart["low"]) / expected < 1.4
    )


def test_users_are_compared_with_themselves():
    ours = np.array([[7, 1, 1], [3, 50, 2], [9, 50, 50]])
    theirs = np.array([[3, 50, 50], [5, 1, 1], [9, 50, 1], [7, 1, 1]])  # user 5 is theirs alone
    run = PeerRun({}, 4, theirs)
    found = compare([ours], {}, [run], "/unseen")["hr@10/unseen"]
    assert (found["percent"], found["users"]) == (0, 3)  # 7 and 3 against 7 and 9
    assert compare([ours], {}, [run], "")["hr@10"]["percent"] == 0


def test_the_peer_reads_the_same_events(data, tmp_path):
    from freescale.data.ingest.prepare import prepare

    histories = prepare(str(data), tmp_path / "cache", "auto", None, None)
    write_interactions(histories, tmp_path / "events.parquet")
    given, written = (
        pq.read_table(path).to_pylist() for path in (data, tmp_path / "events.parquet")
    )
    key = lambda event: (event["user_id"], event["timestamp"])  # noqa: E731
    assert sorted(given, key=key) == sorted(written, key=key) and len(given) == len(written)


def test_figures_of_the_peer(tmp_path):
    raw = {
        "filtered": {"hr@10": 0.5, "ndcg@10": 0.25},
        "unfiltered": {"hr@10": 0.4, "ndcg@10": 0.2},
    }
    path = tmp_path / "peer.json"
    (tmp_path / "r.csv").write_text("rank,rank_unseen,user_id\n5,4,9\n")
    path.write_text(json.dumps(raw | {"ranks": "r.csv", "users": 1}))
    (run,) = read_figures(path)
    assert run.figures["hr@10"] == 0.4 and run.figures["ndcg@10/unseen"] == 0.25
    assert run.ranks.tolist() == [[9, 5, 4]]
    path.write_text("{}")
    with pytest.raises(ValueError, match="peer.json does not hold what run_gr.py prints"):
        read_figures(path)
    folder = tmp_path / "peer-0"
    folder.mkdir()
    assert read_run(folder) is None
    log = folder / "log.txt"
    log.write_text('epoch 1\n{"epoch": 1}\n')  # interrupted after an evaluation
    assert read_run(folder) is None
    log.write_text(f"epoch 1\n{json.dumps(raw | {'peer': 'x'})}\n")
    assert read_run(folder).figures == run.figures


def test_mistakes(tmp_path, data):
    with pytest.raises(ValueError, match="has no run_gr.py"):
        peer.make_jobs(tmp_path / "run_gr.py", "hstu", data, tmp_path, [0], 1, "cpu")
    with pytest.raises(ValueError, match="--peer-config is missing"):
        peer.find_config(None, None)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Plan(data="x", name="x", seeds=0)
    for change in ("epochs", "wdith=3", "epochs=many", "shuffle=maybe"):
        with pytest.raises(ValueError, match=change):
            Plan(data="x", name="x", changes=[change]).list_seeds()
    given = Plan(data="x", name="x", changes=["shuffle=false", "lr=1"]).list_seeds()[0].settings
    assert given["shuffle"] is False and given["lr"] == 1.0


def test_a_failed_run_is_named_with_the_end_of_its_log(tmp_path, capsys):
    jobs = [Job("good", ["true"], tmp_path / "a.txt")]
    jobs.append(Job("bad", ["sh", "-c", "echo why; exit 3"], tmp_path / "b.txt"))
    with pytest.raises(ValueError, match=r"bad \(.*b.txt\): why"):
        run_jobs(jobs, 2)
    assert "bad: failed with status 3" in capsys.readouterr().out


def write_compared(folder, name, users, percents, gpu="NVIDIA H200"):
    """A result of a recipe beside the peer, as far as `--together` reads it."""
    path = folder / f"quality-hstu-small-{name}-h200.json"
    path.write_text(
        json.dumps(
            {
                "name": "quality",
                "machine": {"gpu": gpu},
                "versions": {"torch": "2.11.0"},
                "commit": "abc",
                "date": "2026-11-17T22:00:00Z",
                "dataset": {"name": name},
                "comparison": {metric: {"percent": value} for metric, value in percents.items()},
                "rows": [{"arm": "hstu-small", "users": users}],
            }
        )
    )
    return path


def test_results_together_have_the_mean_of_all_and_the_lowest_of_many_users(tmp_path, capsys):
    few = write_compared(tmp_path, "few", 943, {"hr@10/unseen": -5.0, "ndcg@10/unseen": -4.0})
    many = write_compared(tmp_path, "many", 6040, {"hr@10/unseen": 7.0, "ndcg@10/unseen": -2.5})
    bench_together([few, many], Destination(tmp_path / "results", "def"))
    result = json.loads((tmp_path / "results" / "quality-together-h200.json").read_text())
    mean, lowest = result["claims"]
    assert (mean["measured"], mean["asked"], mean["holds"]) == (-1.125, 0.0, False)
    assert (lowest["measured"], lowest["asked"], lowest["holds"]) == (-2.5, -3.0, True)
    assert [row["data"] for row in result["rows"]] == ["few", "few", "many", "many"]
    assert result["machine"] == {"gpu": "NVIDIA H200"}
    assert "FAILS  4 differences" in capsys.readouterr().out


def test_results_that_cannot_stand_together_are_refused_by_name(tmp_path):
    one = write_compared(tmp_path, "one", 6040, {"hr@10": 1.0})
    alone = write_compared(tmp_path, "alone", 6040, {})
    elsewhere = write_compared(tmp_path, "elsewhere", 6040, {"hr@10": 1.0}, gpu="another")
    with pytest.raises(ValueError, match="alone-h200.json compares nothing"):
        bench_together([one, alone], Destination(tmp_path, "def"))
    with pytest.raises(ValueError, match="elsewhere-h200.json is from another machine"):
        bench_together([one, elsewhere], Destination(tmp_path, "def"))
