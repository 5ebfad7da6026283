"""`freescale train --order time`, and the commands on such a run."""

from __future__ import annotations

import csv
import json

import pyarrow.parquet as pq
import pytest
from helpers.command import freescale
from helpers.time_order import DAY, START, write_events

SMALL = ["--device", "cpu", "--global-batch", "16", "--width", "8", "--negatives", "8", "--layers"]
SMALL += ["1", "--max-length", "12", "--order", "time", "--log-every", "2"]
RANKING = ["--task", "ranking", "--labels", "click", "--candidates", "1"]
RANKING += ["--anchor-actions", "1,4", "--history-pools", "1,2,4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_events(tmp_path_factory.mktemp("events") / "events.parquet", text=True)


def train(data, folder, *more):
    cache = data.parent / "cache"
    return freescale("train", "--data", data, "--folder", folder, "--cache", cache, *SMALL, *more)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train(data, folder), folder


def read_windows(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "window" in line]


def test_the_command_shows_windows(run):
    done, folder = run
    assert done.returncode == 0, done.stderr
    assert "samples in 4 windows of time, 60 items" in done.stdout
    assert "  window 2  hr@10" in done.stdout and "train again with --split none" not in done.stdout
    assert [line["window"]["number"] for line in read_windows(folder)] == [2, 3, 4, 5]
    assert read_windows(folder)[-1]["window"]["from"] == START + 5 * DAY
    assert freescale("report", folder, "--out", folder / "report.html").returncode == 0
    assert "Validation ndcg@10" in (folder / "report.html").read_text()


def test_eval_has_the_figures_of_the_last_window(run):
    _, folder = run
    done = freescale("eval", folder)
    assert done.returncode == 0, done.stderr
    quality = json.loads((folder / "eval-test.json").read_text())["quality"]
    assert quality == read_windows(folder)[-1]["test"]
    done = freescale("eval", folder, "--part", "validation")
    assert done.returncode and "a run in order of time has no validation part" in done.stderr


def test_eval_lists_the_rank_of_each_target(run, data, tmp_path):
    """By user: samples are in order of time, users of the file are not."""
    _, folder = run
    done = freescale("eval", folder, "--ranks", tmp_path / "ranks.csv")
    assert done.returncode == 0, done.stderr
    expected, seen = {}, set()
    for event in pq.read_table(data).to_pylist():
        user = event["user_id"]
        if event["timestamp"] >= START + 5 * DAY and user in seen:
            expected.setdefault(user, event["item_id"])
        seen.add(user)
    with open(tmp_path / "ranks.csv", newline="") as file:
        found = {line["user_id"]: line["item_id"] for line in csv.DictReader(file)}
    assert found == expected and len(found) > 20


def test_recommend_reads_whole_histories(run, data, tmp_path):
    _, folder = run
    done = freescale("recommend", folder, "--out", tmp_path / "best.parquet", "--k", 5)
    assert done.returncode == 0, done.stderr
    users = set(pq.read_table(tmp_path / "best.parquet").column(0).to_pylist())
    assert users == set(pq.read_table(data).column("user_id").to_pylist())
    done = freescale("export", folder, "--out", tmp_path / "export", "--for", "serving")
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "export" / "model_card.json").read_text())
    assert card["data"]["split"] == "windows"
    assert "Events of the last window of 1d were not trained on." in card["limits"]


def test_ranking_resumes_on_two_ranks(data, tmp_path):
    done = train(data, tmp_path / "run", *RANKING, "--steps", 5)
    assert done.returncode == 0, done.stderr
    done = freescale(
        "train", "--folder", tmp_path / "run", "--resume", "--steps", 100, "--nproc", 2
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_windows(tmp_path / "run") if "validation" in line]
    assert [line["window"]["number"] for line in lines] == [2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "leave-one-out"], "--split leave-one-out with --order time"),
        (["--window", "10d"], "the data has 2 windows of 864000"),
        (["--windows", "5"], "--windows 5 trains as many"),
        (["--history-pools", "1"], "--history-pools 1 is of --task ranking"),
        (["--keep", "best", "--evaluate-every", "1"], "--keep best with --order time"),
    ],
)
def test_what_the_command_refuses(data, tmp_path, options, message):
    done = train(data, tmp_path / "run", *options)
    assert done.returncode and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_time_ordered_run_is_not_continued_without_newer_data_or_simulated(run, data, tmp_path):
    _, folder = run
    done = freescale("train", "--from", folder, "--data", data, "--folder", tmp_path / "next")
    assert done.returncode and "no window of 86400" in done.stderr and "newer data" in done.stderr
    done = freescale("simulate", "--run", folder)
    assert done.returncode and "the run trains in order of time (--order time)" in done.stderr
