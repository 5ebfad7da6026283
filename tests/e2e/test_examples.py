"""Examples and commands that the documentation shows: they run as written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


def test_own_model_on_two_ranks():
    done = run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "examples/own_model.py",
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")
    ]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "table item: 100,000 x 32, RowWiseAdagrad, sharded" in done.stdout


def test_ranking_model_on_two_ranks():
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*ranks, "examples/ranking_model.py")
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert [words[1] for words in steps] == ["0", "20", "40", "60"]
    first, last = (float(words[-1]) for words in (steps[0], steps[-1]))  # click accuracy
    assert first < 0.6 and last > 0.8
    assert "table category: 20 x 16, Adam, replicated" in done.stdout


def test_snippets_of_own_model(tmp_path):
    """docs/own_model.md, block after block, on two ranks."""
    blocks = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert len(blocks) == 9
    checks = """
assert len(losses) == 6 and len(batch) == 2 and len(more) == 3
assert more[0] < losses[0]  # the same batch, a second time
assert 0 < found["click"] < 1 and 24 < found["length"] < 26 and set(output) == {"click"}
another = freescale.Pipeline(other, torch.optim.AdamW(other.dense_parameters()))
list(another.run(batches(transport.rank, steps=1)))
assert "Adam, sharded" in "".join(other.tables.describe()), other.tables.describe()
if transport.rank == 0:
    names = sorted(path.name for path in files)
    assert names == ["dense.safetensors", "table.item.safetensors"], names
    print("done", mine.steps)
transport.close()
"""
    (tmp_path / "snippets.py").write_text("\n".join([*blocks, checks]))
    told = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "snippets.py"]
    done = subprocess.run(
        [sys.executable, *ranks],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=told,
    )
    assert done.returncode == 0, done.stderr
    assert "done 3" in done.stdout


def test_generate_and_train_on_it(tmp_path):
    data, folder = tmp_path / "histories.parquet", tmp_path / "run"
    arguments = [
        "--users",
        "160",
        "--items",
        "4000",
        "--median",
        "20",
        "--cap",
        "60",
        "--collision",
        "0.12",
        "--global-batch",
        "16",
    ]
    made = run("-m", "freescale", "generate", data, *arguments)
    assert made.returncode == 0, made.stderr
    assert "160 users" in made.stdout
    options = [
        "--global-batch",
        "16",
        "--steps",
        "6",
        "--width",
        "8",
        "--no-shuffle",
        "--split",
        "none",
        "--tensorboard",
        "--device",
        "cpu",
    ]
    done = run("-m", "freescale", "train", "--data", data, "--folder", folder, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "ledger.json").read_text())["steps"] == 6
    assert list((folder / "tensorboard").glob("events.*"))


def test_picture_of_a_run(tmp_path):
    data, folder = tmp_path / "histories.parquet", tmp_path / "run"
    assert (
        run(
            "-m",
            "freescale",
            "generate",
            data,
            "--users",
            64,
            "--items",
            300,
            "--median",
            10,
            "--cap",
            30,
        ).returncode
        == 0
    )
    options = ["--global-batch", "16", "--steps", "4", "--width", "8", "--device", "cpu"]
    assert (
        run("-m", "freescale", "train", "--data", data, "--folder", folder, *options).returncode
        == 0
    )
    done = run("-m", "freescale.bench.serial.figure", folder, tmp_path / "step.svg", "--first", 1)
    assert done.returncode == 0, done.stderr
    picture = (tmp_path / "step.svg").read_text()
    assert picture.startswith("<svg") and "forward" in picture and "rank 0: network" in picture
