"""Trackers: what is sent, and that a service that fails or hangs costs one warning."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from freescale.train import trackers


class Fake(trackers._Service):
    name, package = "Fake", "json"

    def __init__(self, work=lambda: None):
        super().__init__()
        self.work, self.rows, self.closed = work, [], False

    def open(self, trainer):
        self.work()

    def write(self, values, step):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed = True


def train(tracker, rank=0):
    run = SimpleNamespace(rank=rank, step=3)
    tracker.on_start(run)
    tracker.on_log(run, {"step": 3, "loss": 0.5, "rollback": {"loss": 1}, "none": None})
    tracker.on_evaluation(run, {"model": {"hr@10": 0.25, "auc": float("nan")}}, "test")
    tracker.on_end(run, {})
    return tracker


def test_numbers_are_sent_in_order():
    tracker = train(Fake())
    assert tracker.rows == [(3, {"loss": 0.5}), (3, {"test/hr@10": 0.25})] and tracker.closed


def test_rank_0_alone_sends():
    assert train(Fake(), rank=1)._thread is None


def test_a_failure_is_one_warning(capsys):
    def fail():
        raise RuntimeError("no server\nat all")

    tracker = train(Fake(fail))
    assert not tracker.rows
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and "Fake has not got all metrics" in told
    assert "RuntimeError: no server" in told and "at all" not in told


def test_a_service_that_hangs_does_not_hold_the_run(capsys, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.1)
    hung = threading.Event()
    train(Fake(hung.wait))
    hung.set()
    assert "did not answer" in capsys.readouterr().err


def test_a_full_queue_is_one_warning(capsys, monkeypatch):
    monkeypatch.setattr(trackers, "_ROOM", 2)
    monkeypatch.setattr(trackers, "PATIENCE", 0.1)
    hung = threading.Event()
    tracker = Fake(hung.wait)
    run = SimpleNamespace(rank=0, step=3)
    tracker.on_start(run)
    for _ in range(9):
        tracker.on_log(run, {"loss": 0.5})
    hung.set()
    assert capsys.readouterr().err.count("warning") == 1


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(Fake, "package", "no_such_package")
    with pytest.raises(ValueError, match="pip install no_such_package"):
        Fake()
