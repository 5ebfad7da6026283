"""`freescale train --head dlrm` on a small file with features of items and requests, and what
becomes of the run."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.command import freescale
from helpers.small_runs import interactions, train

import freescale as library

FEATURES = "artist,album,context.hour=categorical,context.device=categorical"
OPTIONS = ["--task", "ranking", "--labels", "like", "--head", "dlrm", "--candidates", "1",
           "--features", FEATURES]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dlrm")
    random = np.random.default_rng(1)
    columns = {
        "action": random.integers(0, 8, 480),
        "like": random.integers(0, 2, 480),
        "hour": np.arange(480) // 20,
        "device": random.choice(["phone", "desk"], 480),
    }
    data = interactions(folder / "events.parquet", **columns)
    items = folder / "items.parquet"
    ids = np.arange(60)
    attributes = {"item_id": ids, "artist": [f"a{n % 7}" for n in ids], "album": ids // 3}
    pq.write_table(pa.table(attributes), items)
    done = train(folder, data, "--items", items, *OPTIONS, "--epochs", 3)
    assert done.returncode == 0, done.stderr
    return folder, data, items, done.stdout


def test_trains_says_how_and_evaluates(run):
    folder, data, items, output = run
    assert "the layers of --head dlrm run in plain torch" in output
    for table in ("item", "item_features", "context_features"):
        assert f"table {table}: " in output
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) > 2 and np.isfinite(losses).all()
    assert freescale("eval", folder / "run", "--device", "cpu").returncode == 0
    found = json.loads((folder / "run/eval-test.json").read_text())
    assert 0 <= found["quality"]["model"]["auc/like"] <= 1


def test_what_reads_the_run_refuses_or_works(run):
    folder, data, items, _ = run
    with pytest.raises(ValueError, match="--head dlrm is trained and evaluated, but cannot be"):
        library.load(folder / "run")
    done = freescale("export", folder / "run", "--out", folder / "out")
    assert done.returncode == 1 and "cannot be loaded yet" in done.stderr
    checkpoint = next((folder / "run/checkpoints").glob("step-*"))
    files = library.export(checkpoint, folder / "weights")
    assert {path.name for path in files} == {
        "dense.safetensors", "table.item.safetensors", "table.item_features.safetensors",
        "table.context_features.safetensors",
    }  # fmt: skip


def test_requests_of_several_candidates_are_refused(run):
    folder, data, items, _ = run
    more = ["--items", items, *OPTIONS, "--candidates", 3]
    done = train(folder / "more", data, *more)
    assert done.returncode == 1 and "give --candidates 1" in done.stderr
