"""`freescale demo`: the run, then serial against all techniques, with a page that compares the
two."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.command import freescale

from freescale.cli import demo
from freescale.data.synthetic.generate import generate

SMALL = {
    "global_batch": 8,
    "steps": 5,
    "max_length": 20,
    "width": 8,
    "negatives": 4,
    "log_every": 5,
}


@pytest.fixture
def forked(monkeypatch):
    """The compared runs start without a Python of their own."""

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "freescale"]
        done = freescale(*command[3:])
        print(done.stderr, file=sys.stderr)
        return done

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run, DEVNULL=None))


def test_compare_trains_the_same_steps_twice_and_says_what_it_shows(
    forked, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(demo, "SHORT_SETTINGS", {**demo.SHORT_SETTINGS, **SMALL})
    data = tmp_path / "data.parquet"
    generate(data, users=40, items=2000, median=10, cap=20, global_batch=8, ranks=2)
    assert demo.compare_schedules(data, tmp_path, 2) == 0
    table = capfd.readouterr().out
    ledgers = [
        json.loads((tmp_path / f"short-{name}" / "ledger.json").read_text())
        for name in ("serial", "staged")
    ]
    assert [ledger["steps"] for ledger in ledgers] == [5, 5]
    assert set(ledgers[1]["paths"]["rows"]) == {"hostwire: shared memory"} and set(
        ledgers[0]["paths"]["rows"]
    ) == {"gloo"}
    losses = re.search(r"last loss\W+([\d.]+)\W+([\d.]+)", table)
    assert losses and float(losses[1]) == pytest.approx(float(losses[2]), rel=1e-4)
    faster = ledgers[1]["samples_per_second"] / ledgers[0]["samples_per_second"]
    write_run(tmp_path)
    demo.print_ending(tmp_path)
    said = capfd.readouterr().out
    ending = " ".join(said.split())
    assert f"the full system made {faster:.2f} times serial's samples/s" in ending
    assert ("gains nothing" in ending) == (faster < 1.03)
    page = Path(ending.split("side by side: ")[1])
    assert page == tmp_path / "compare.html"
    text = page.read_text(encoding="utf-8")
    assert (
        "short-serial" in text
        and "short-staged" in text
        and all(f"{ledger['step_ms']['median']}" in text for ledger in ledgers)
    )


def write_run(folder: Path) -> None:
    """What the ending reads of the demonstration's own run."""
    quality = {"model": {"hr@10": 0.7232}, "popularity": {"hr@10": 0.0845}}
    lines = [{"step": 1, "loss": 2.0}, {"step": 1, "test": quality}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ledger.json").write_text(json.dumps({"ranks": 2}))
    (folder / "config.json").write_text(json.dumps({"train": {"device": "cpu"}}))


@pytest.mark.parametrize("activated", [True, False])
def test_the_ending_says_what_was_seen_and_what_to_type(tmp_path, monkeypatch, capfd, activated):
    """Commands that work as they stand, also where the environment is not activated."""
    monkeypatch.setattr(demo.shutil, "which", lambda name: "/bin/freescale" if activated else None)
    program = tmp_path / ".venv" / "bin" / "freescale"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr(demo.sys, "executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    demo.print_ending(tmp_path)
    said = capfd.readouterr().out
    paragraph = " ".join(said.split("Next")[0].split())
    assert "For 72 % of the users" in paragraph and "reaches 8 %" in paragraph
    assert "2 CPU processes (ranks) trained" in paragraph and "serial" not in paragraph.lower()
    name = "freescale" if activated else ".venv/bin/freescale"
    commands = re.findall(r"^  (\S.*?) +# ", said, re.M)
    assert commands == [
        f"{name} report {tmp_path}",
        f"{name} recommend {tmp_path} --out recs.csv",
        f"{name} inspect FILE",
        f"{name} train --data FILE --nproc 2",
    ]


@pytest.mark.parametrize(
    "wanted, gpus, expected",
    [(2, 0, (2, "cpu")), (2, 1, (1, "cuda")), (2, 8, (2, "cuda")), (1, 1, (1, "cuda"))],
)
def test_the_first_part_runs_on_gpus_if_there_are_any(wanted, gpus, expected):
    assert demo.choose_demo_ranks(wanted, gpus) == expected


@pytest.mark.parametrize("rate, gains", [(96.0, False), (100.0, False), (130.0, True)])
def test_the_ending_prints_a_gain_only_if_there_is_one(rate, gains, tmp_path, monkeypatch):
    write_run(tmp_path)
    (tmp_path / demo.COMPARISON).touch()
    for name, measured in (("serial", 100.0), ("staged", rate)):
        run = tmp_path / f"short-{name}"
        run.mkdir()
        write_run(run)
        (run / "ledger.json").write_text(json.dumps({"ranks": 2, "samples_per_second": measured}))
    ending = demo._describe_results(tmp_path)
    assert f"{rate / 100:.2f} times serial's samples/s" in ending
    assert ("it gains nothing on this machine" in ending) is not gains
    assert "other programs" not in ending


def test_a_comparison_that_fails_is_the_demo_failing(forked, tmp_path, capfd):
    assert demo.compare_schedules(tmp_path / "nowhere.parquet", tmp_path, 2) == 1
    assert "nowhere.parquet" in capfd.readouterr().err


@pytest.mark.parametrize(
    "ranks, status, expected",
    [
        pytest.param(2, 0, ["train", "compare", "ending", "items"], id="two ranks"),
        pytest.param(1, 0, ["train", "ending", "items"], id="one rank"),
        pytest.param(2, 1, ["train"], id="training fails"),
    ],
)
def test_the_demo_ends_with_what_was_seen(ranks, status, expected, tmp_path, monkeypatch):
    """Not after a failure; where one rank waits for nobody, nothing is compared."""
    called: list[str] = []
    monkeypatch.setattr(demo, "train_run", lambda *given: called.append("train") or status)
    monkeypatch.setattr(demo, "make_data", lambda path, options: path)
    monkeypatch.setattr(demo, "compare_schedules", lambda *given: called.append("compare") or 0)
    monkeypatch.setattr(demo, "print_ending", lambda folder: called.append("ending"))
    monkeypatch.setattr(demo, "print_recommendations", lambda folder: called.append("items"))
    assert demo.run_demo(ranks, tmp_path) == status and called == expected
