"""Runs with data workers: they train what a run without them trains, and wait for nobody."""

from __future__ import annotations

import os
import signal

import pytest

from freescale import RunConfig, Trainer
from freescale.config import DataConfig, ModelConfig, TrainConfig
from freescale.data.synthetic.generate import generate
from freescale.worker_server import WorkerServer, start_early


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "data.parquet"
    generate(path, users=60, items=50, median=9, cap=30, seed=1)
    return path


def configure(data, workers):
    return RunConfig(
        data=DataConfig(data=str(data), max_length=30, negatives=8, workers=workers, split="none"),
        model=ModelConfig(width=16, layers=1, heads=1),
        train=TrainConfig(device="cpu", global_batch=8, steps=6),
    )


def train(config, folder, **options):
    return [step.loss for step in Trainer(config, folder, **options).iterate()]


def test_no_step_waits_for_workers(data, tmp_path):
    """Their server is stopped before it is up, and stays so."""
    expected = train(configure(data, 0), tmp_path / "alone")
    server = WorkerServer()
    os.kill(server.pid, signal.SIGSTOP)
    assert train(configure(data, 2), tmp_path / "run", worker_server=server) == expected
    assert not server.is_open


def test_a_run_whose_server_has_ended_says_so(data, tmp_path):
    server = WorkerServer()
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match="data worker 0 was killed by signal 9"):
        train(configure(data, 2), tmp_path / "run", worker_server=server)
    assert not server.is_open


def test_a_server_is_started_where_workers_are_expected(data, monkeypatch):
    assert start_early(configure(data, 0)) is None
    assert start_early(configure(data, None)) is None  # a thread, on CPUs
    server = start_early(configure(data, 1))
    assert server is not None and server.is_open
    server.close()
    assert not server.is_open
