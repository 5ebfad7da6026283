"""A run whose output is a file prints a line for 5 % of its steps, not one for every entry."""

from __future__ import annotations

from types import SimpleNamespace

from freescale.train.progress import ConsoleProgress


def log(steps, total, capsys):
    progress = ConsoleProgress()
    for step in steps:
        entry = {"step": step, "epoch": 0, "loss": 1.0, "samples_per_second": 10.0}
        progress.on_log(SimpleNamespace(rank=0, total=total), entry)
    return capsys.readouterr().out.splitlines()


def test_a_log_has_twenty_lines(capsys):
    lines = log(range(10, 1001, 10), 1000, capsys)
    assert len(lines) == 20 and lines[0].startswith("step 10 ")


def test_a_short_run_prints_every_entry(capsys):
    assert len(log(range(1, 6), 5, capsys)) == 5


def test_a_long_run_prints_a_line_a_minute(capsys, monkeypatch):
    seconds = iter(range(0, 600, 30))
    monkeypatch.setattr("freescale.train.progress.time.monotonic", lambda: next(seconds))
    assert len(log(range(1, 21), 10**6, capsys)) == 10
