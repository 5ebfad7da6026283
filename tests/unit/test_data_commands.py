"""Anybody's CSV on the command line: inspect, train, export, and eval from another folder."""

from __future__ import annotations

import csv as text_tables
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from freescale.cli.main import main
from freescale.data.inspection import draw_lengths

SMALL = "--steps 2 --width 8 --layers 1 --heads 1 --negatives 4 --device cpu --profile-steps 0"


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def csv(tmp_path) -> Path:
    """Eight users with five events each, and one with one; ids are strings."""
    lines = [f"u{user},i{(user + n) % 7},{n}" for user in range(8) for n in range(5)]
    path = tmp_path / "y.csv"
    path.write_text("\n".join(["customer,sku,when", *lines, "lonely,i0,0", ""]))
    return path


def test_a_csv_of_strings_is_inspected_trained_on_and_exported(csv, tmp_path, monkeypatch):
    common = ["--columns", "time=when", "--cache", tmp_path / "cache"]
    shown = invoke("inspect", csv, *common, "--global-batch", 2)
    read_as = (
        f"{csv} (csv): customer -> user (9 strings), sku -> item (7 strings), "
        "when -> time (integers, of no known unit)"
    )
    for words in (
        *(read_as, "users              8\n", "items              7 ", "events            40 "),
        *("4 to 7 ", "collisions, global batch 2: ", "left out: 1 users with fewer than 2 events"),
        f"freescale train --data {csv} --columns time=when",
    ):
        assert words in shown, shown
    run = tmp_path / "run"
    trained = invoke("train", "--data", csv, *common, "--folder", run, *SMALL.split())
    assert read_as in trained and "for production, train again with --split none" in trained
    exported = invoke("export", run, "--out", tmp_path / "out").split()
    assert str(tmp_path / "out" / "vocabulary.parquet") in exported
    for folder in (run, tmp_path / "out"):
        vocabulary = pq.read_table(folder / "vocabulary.parquet").to_pylist()
        items = [row["text"] for row in vocabulary if row["column"] == "item_id"]
        assert items == [f"i{n}" for n in (0, 1, 2, 3, 4, 5, 6)]

    # ids of other data have other codes: the model would rank the wrong items
    other = tmp_path / "other.csv"
    other.write_text("\n".join(reversed(csv.read_text().splitlines()[1:])) + "\n")
    other.write_text("customer,sku,when\n" + other.read_text())
    done = CliRunner().invoke(main, ["eval", str(run), "--data", str(other)])
    assert done.exit_code == 1 and "ids of this data are numbered otherwise" in done.output
    csv.unlink()
    done = CliRunner().invoke(main, ["eval", str(run)])
    assert done.exit_code == 1 and f"{csv}: no such file" in done.output
    assert "pass --data with its path" in done.output


def read_ranks(path: Path) -> dict[str, str]:
    """Targets by user, as a program reads them that knows only the source file."""
    with open(path, encoding="utf-8", newline="") as file:
        return {row["user_id"]: row["item_id"] for row in text_tables.DictReader(file)}


@pytest.mark.parametrize(
    ("user", "item"),
    [
        pytest.param("u{}", "sku, {} \u00e9", id="strings"),
        pytest.param("{}007", "{}", id="integers"),
        pytest.param("-{}", "9{}000000000000", id="numbered integers"),
    ],
)
def test_ranks_are_listed_by_the_ids_of_the_file(user, item, tmp_path):
    path, run, cache = tmp_path / "y.csv", tmp_path / "run", ["--cache", tmp_path / "cache"]
    events = [
        (user.format(u + 1), item.format((u + n) % 7 + 1)) for u in range(8) for n in range(5)
    ]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = text_tables.writer(file)
        writer.writerow(["user", "item", "time"])
        writer.writerows([*event, time] for time, event in enumerate(events))
    invoke("train", "--data", path, *cache, "--folder", run, *SMALL.split())
    invoke("eval", run, "--ranks", tmp_path / "ranks.csv")
    assert read_ranks(tmp_path / "ranks.csv") == dict(events), "the last event of each user"


def test_figures_of_other_data_leave_those_of_the_run_alone(csv, tmp_path):
    common = ["--columns", "time=when", "--cache", tmp_path / "cache"]
    run = tmp_path / "run"
    invoke("train", "--data", csv, *common, "--folder", run, *SMALL.split())
    invoke("eval", run)
    own = (run / "eval-test.json").read_text()
    moved = tmp_path / "moved.csv"
    moved.write_text(csv.read_text())
    assert f"all metrics are in {run}/eval-test.json" in invoke("eval", run, "--data", moved)
    csv.write_text(csv.read_text() + "u3,i1,100\n")  # an event more, in the same place
    later = invoke("eval", run).split("all metrics are in ")[1].split()[0]
    other = tmp_path / "other.csv"
    other.write_text(moved.read_text() + "u2,i3,100\n")
    another = invoke("eval", run, "--data", other).split("all metrics are in ")[1].split()[0]
    names = {"eval-test.json", Path(later).name, Path(another).name}
    assert len(names) == 3 and {path.name for path in run.glob("eval-*")} == names
    found = json.loads(Path(another).read_text())
    assert found["data"] == str(other) and found["quality"] != json.loads(own)["quality"]
    kept = json.loads((run / "eval-test.json").read_text())
    assert kept == json.loads(own) | {"data": str(moved)}


def test_an_export_follows_the_umask_and_replaces_another_only_on_request(csv, tmp_path):
    common = ["--columns", "time=when", "--cache", tmp_path / "cache"]
    run, out = tmp_path / "run", tmp_path / "out"
    invoke("train", "--data", csv, *common, "--folder", run, *SMALL.split())
    before = os.umask(0o027)
    try:
        invoke("export", run, "--out", out)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}
    stale = out / "table.of_another_model.safetensors"
    stale.write_bytes(b"")
    done = CliRunner().invoke(main, ["export", str(run), "--out", str(out)])
    assert done.exit_code == 1 and str(out) in done.output and "--overwrite" in done.output
    assert stale.exists()
    again = invoke("export", run, "--out", out, "--overwrite").split()
    assert sorted(again) == sorted(map(str, out.iterdir())), "only files of this export"


def test_the_command_of_short_histories_trains_on_them(tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("user,item,time\n" + "".join(f"{n // 3},{n % 7},{n}\n" for n in range(12)))
    shown = invoke("inspect", path, "--cache", tmp_path / "cache").splitlines()
    assert "collisions: none to count, since a batch of 64 holds all users" in "\n".join(shown)
    command = shown[-1].removeprefix("train on it: freescale ")
    trained = invoke(*shlex.split(command), "--folder", tmp_path / "run", *SMALL.split())
    assert "last loss" in trained and "--split none" in command
    assert "for production" not in trained


def test_labels_that_cannot_be_trained_are_refused_before_training(tmp_path):
    path = tmp_path / "y.csv"
    path.write_text("user,item,time,rating\n" + "".join(f"1,{n},{n},{n}\n" for n in range(6)))
    for labels, words in (("rating", "holds 2.0, not 0 or 1"), ("stars", "'stars'")):
        inspect = ["inspect", str(path), "--cache", str(tmp_path / "c"), "--labels", labels]
        done = CliRunner().invoke(main, inspect)
        assert done.exit_code == 1 and words in done.output and "train on it" not in done.output


@pytest.mark.parametrize("command", [["inspect"], ["train", "--data"]])
def test_a_pattern_that_the_shell_has_replaced_is_explained(command, tmp_path):
    files = [tmp_path / f"part {number}.csv" for number in range(3)]
    for file in files:
        file.write_text("user,item,time\n1,2,3\n")
    done = CliRunner().invoke(main, [*command, *map(str, files)])
    assert done.exit_code == 2 and f"for instance '{tmp_path}/part *.csv'." in done.output
    done = CliRunner().invoke(main, [*command, str(files[0]), "no-file"])
    assert done.exit_code == 2 and "for instance" not in done.output


def test_labels_without_ranking_are_refused(csv, tmp_path):
    train = ["train", "--data", str(csv), "--labels", "a=b>1", "--folder", str(tmp_path / "run")]
    done = CliRunner().invoke(main, train)
    assert done.exit_code == 1 and "add --task ranking" in done.output


def test_a_terminal_without_blocks_has_another_picture(csv, tmp_path):
    arguments = ["inspect", str(csv), "--columns", "time=when", "--cache", str(tmp_path / "cache")]
    shown = CliRunner(charset="cp1252").invoke(main, arguments)
    assert shown.exit_code == 0 and f"4 to 7 {'#' * 40} 8" in shown.output


def test_a_reader_that_leaves_is_no_error(csv, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ["inspect", str(csv), "--columns", "time=when", "--cache", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "freescale", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_lengths_are_drawn_by_powers_of_two():
    picture = draw_lengths([2, 3, 3, 9] + [16] * 40)
    assert [line.split()[:3] for line in picture] == [
        ["2", "to", "3"], ["4", "to", "7"], ["8", "to", "15"], ["16", "to", "31"],
    ]  # fmt: skip
    assert [int(line.split()[-1]) for line in picture] == [3, 0, 1, 40]
    assert [line.count("\u2588") for line in picture] == [3, 0, 1, 40]
