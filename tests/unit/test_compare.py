"""`freescale compare`: settings that differ, and every figure."""

from __future__ import annotations

import json

from click.testing import CliRunner

from freescale.cli.main import main


def write(folder, lr, metrics):
    folder.mkdir()
    config = {"train": {"lr": lr, "seed": 0}, "model": {"width": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"step": 5, "loss": 2.0}, *metrics]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def compare(tmp_path, *more):
    first = {"step": 5, "validation": {"model": {"ndcg@10": 0.1}, "popularity": {"ndcg@10": 9.0}}}
    last = {"step": 8, "validation": {"model": {"ndcg@10": 0.125}}}
    write(tmp_path / "one", 0.001, [first, last])
    write(tmp_path / "two", 0.01, [{"step": 8, "test": {"model": {"ndcg@10": 0.2}}}])
    found = CliRunner().invoke(
        main, ["compare", str(tmp_path / "one"), str(tmp_path / "two"), *more]
    )
    assert found.exit_code == 0, found.output
    return found.output


def test_rows_are_what_differs_and_the_last_figures(tmp_path):
    assert json.loads(compare(tmp_path, "--json")) == {
        "train.lr": {"one": 0.001, "two": 0.01},
        "steps": {"one": 8, "two": 8},
        "validation ndcg@10": {"one": 0.125, "two": None},
        "test ndcg@10": {"one": None, "two": 0.2},
    }


def test_the_table_has_a_column_for_each_run(tmp_path):
    told = compare(tmp_path)
    assert "one" in told and "two" in told and "0.1250" in told and "seed" not in told


def test_a_folder_without_a_run_is_named(tmp_path):
    found = CliRunner().invoke(main, ["compare", str(tmp_path / "none")])
    assert found.exit_code != 0 and "not the folder of a run" in found.output
