"""examples/ray/train.py on a real Ray: a worker is killed, and the bits are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.weights import read_weights

from freescale.data.synthetic.generate import generate

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "device": "cpu",
    "global_batch": 16,
    "width": 8,
    "layers": 1,
    "negatives": 8,
    "max_length": 20,
    "epochs": 40,
    "checkpoint_every": 20,
    "evaluate_every": 20,
    "dense_sums": "collective",  # `auto` measures: two runs may choose differently
}


def start(folder: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "examples" / "ray" / "train.py", "--ranks", "2"]
    command += [
        "--data",
        folder / "data.parquet",
        "--folder",
        run,
        "--options",
        json.dumps(OPTIONS),
    ]
    told = {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    return subprocess.Popen(
        list(map(str, command)), env={**os.environ, **told}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def find_workers() -> list[int]:
    """Processes of Ray that train."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                words = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if words.startswith(b"ray::") and b"TrainWorker" in words:
                found.append(int(path.name))
    return found


@pytest.mark.long
def test_a_worker_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")  # Ray's sockets are below it: their paths must be short
    generate(folder / "data.parquet", users=96, items=500, median=12, cap=20, seed=0)
    whole, killed = folder / "whole", folder / "killed"
    told, _ = (process := start(folder, whole)).communicate(timeout=300)
    assert process.returncode == 0, told
    assert "test/ndcg@10" in told and "'step': 240" in told, told

    process = start(folder, killed)
    end = time.monotonic() + 200
    while not list((killed / "checkpoints").glob("step-*")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    os.kill(find_workers()[0], signal.SIGKILL)
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 0, told
    restarts = [
        line for line in (killed / "metrics.jsonl").read_text().splitlines() if "restart" in line
    ]
    assert restarts, told
    weights = [read_weights(run, folder / f"export-{run.name}") for run in (whole, killed)]
    assert weights[0] == weights[1]
