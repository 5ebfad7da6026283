"""--tracker with a real MLflow server and W&B's offline mode; services that are gone; a search."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.command import started, wait_for

from freescale.data.synthetic.generate import generate
from freescale.launch.ranks import find_free_port

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("wandb")

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--device", "cpu", "--global-batch", 16, "--width", 8, "--layers", 1, "--negatives", 8),
    *("--max-length", 20, "--evaluate-every", 1, "--log-every", 3, "--lr", 0.002),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.parquet"
    generate(path, users=96, items=500, median=12, cap=20, seed=0)
    return path


@pytest.fixture
def server(serving: tuple[str, subprocess.Popen]) -> str:
    return serving[0]


@pytest.fixture
def end_server(serving: tuple[str, subprocess.Popen]) -> Callable[[], None]:
    return lambda: os.killpg(serving[1].pid, signal.SIGKILL)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    port = find_free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", port, "--workers", 1]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    command += ["--artifacts-destination", tmp_path / "artifacts"]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            wait_for(lambda: _answers(address), 120)
            yield address, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _answers(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{address}/health", timeout=2).status == 200)
    except OSError:
        return False


def train(data: Path, run: Path, tracker: str, *more: object) -> subprocess.CompletedProcess:
    return started("train", "--data", data, "--folder", run, "--tracker", tracker, *SMALL, *more)


def read_expected(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The numbers of metrics.jsonl by name: steps and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        values = {n: v for n, v in entry.items() if isinstance(v, (int, float)) and n != "step"}
        for part in ("validation", "test"):
            if part in entry:
                values = {f"{part}/{n}": v for n, v in entry[part]["model"].items()}
        for name, value in values.items():
            found.setdefault(name, []).append((entry["step"], value))
    return found


@pytest.mark.long
def test_every_metric_and_setting_reaches_mlflow(data, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    run = tmp_path / "run"
    assert (done := train(data, run, "mlflow", "--steps", 12)).returncode == 0, done.stderr
    assert (done := train(data, run, "mlflow", "--resume", "--steps", 18)).returncode == 0
    client = mlflow.MlflowClient(server)
    (experiment,) = [e for e in client.search_experiments() if e.name == "freescale"]
    (found,) = client.search_runs([experiment.experiment_id])  # the resumed run is the same one
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["train.lr"] == "0.002" and found.data.params["model.width"] == "8"
    settings = json.loads((run / "config.json").read_text())
    assert len(found.data.params) > sum(len(each) for each in settings.values()) * 0.9
    expected = read_expected(run)
    assert {"loss", "validation/ndcg@10", "test/ndcg@10"} <= set(expected)
    for name, values in expected.items():
        history = client.get_metric_history(found.info.run_id, name.replace("@", "_at_"))
        assert {(each.step, each.value) for each in history} >= set(values), name


def read_log(path: Path) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's logs, which W&B writes."""
    content, place, parts = path.read_bytes(), 7, []  # a header comes first
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:  # no chunk header fits into the end of a block
            place += left
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        parts.append(content[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


@pytest.mark.long
def test_every_metric_reaches_wandb(data, tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    assert (done := train(data, run, "wandb", "--steps", 12)).returncode == 0, done.stderr
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    found, settings = set(), {}
    for part in read_log(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(part)
        row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
        found |= {(name, row["step"], value) for name, value in row.items() if "step" in row}
        settings |= {c.key: json.loads(c.value_json) for c in record.run.config.update}
    assert settings["train.lr"] == 0.002 and settings["ranks"] == 1
    for name, values in read_expected(run).items():
        assert {(name, step, value) for step, value in values} <= found, name


@pytest.mark.long
@pytest.mark.parametrize("when", ["at the start", "in the middle"])
def test_a_dead_service_never_stops_training(when, data, tmp_path, monkeypatch, request):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{find_free_port()}")
    if when == "in the middle":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server"))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "freescale", "train", "--data", data, "--folder", run]
    command += ["--tracker", "mlflow", *SMALL, "--epochs", 60]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        if when == "in the middle":
            wait_for(lambda: (run / "metrics.jsonl").exists())
            request.getfixturevalue("end_server")()
        told = process.communicate(timeout=300)[1]
    assert process.returncode == 0, told
    assert told.count("warning: MLflow has not got all metrics") == 1
    assert read_expected(run)["test/ndcg@10"][0][0] == 360


@pytest.mark.long
def test_a_search_ends_bad_trials_early_and_continues(data, tmp_path):
    pytest.importorskip("optuna")
    options = {"device": "cpu", "global_batch": 16, "negatives": 8, "max_length": 20, "epochs": 3}
    options["evaluate_every"] = 2

    def search(trials: int) -> subprocess.CompletedProcess:
        command = [sys.executable, ROOT / "examples" / "search" / "search.py", "--data", data]
        command += ["--folder", tmp_path / "search", "--trials", trials]
        command += ["--options", json.dumps(options)]
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=400,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    assert (done := search(3)).returncode == 0, done.stderr
    assert (done := search(2)).returncode == 0, done.stderr  # the same study goes on
    runs = sorted(path.name for path in (tmp_path / "search").glob("trial-*"))
    assert runs == [f"trial-{number}" for number in range(5)]
    assert "best: trial-" in done.stdout
    told = started("compare", *(tmp_path / "search" / name for name in runs[:2]), "--json")
    rows = json.loads(told.stdout)
    assert {"train.lr", "model.width", "test ndcg@10"} & set(rows) and "data.data" not in rows
