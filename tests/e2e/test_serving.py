"""`freescale export --for serving`: what it writes runs without FreeScale, as the model does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers.command import freescale as run_freescale
from helpers.small_runs import interactions, train

import freescale
from freescale.cli.main import main

# runs the example where FreeScale cannot be imported
ALONE = (
    "import runpy, sys; sys.modules['freescale'] = None; path = sys.argv[1]; "
    "sys.argv = sys.argv[1:]; runpy.run_path(path, run_name='__main__')"
)
HISTORY = [
    ("S3", 1_700_000_000),
    ("S9", 1_700_000_400),
    ("S30", 1_700_090_000),
    ("S3", 1_700_090_100),
]


def export(run, out, *options):
    words = ["export", run, "--out", out, "--for", "serving", *options]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return out


def run_example(out, request=None):
    """The lines that the example prints, split."""
    words = [] if request is None else [json.dumps(request)]
    command = [sys.executable, "-I", "-c", ALONE, str(out / "example.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=out)
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory):
    """A run on string ids, with features of items and events, and its export."""
    folder = tmp_path_factory.mktemp("retrieval")
    random = np.random.default_rng(0)
    rows = [
        f"C{random.integers(0, 30)},S{random.integers(0, 40)},{1_700_000_000 + 60 * n},"
        f"{random.choice(['web', 'app', ''])}"
        for n in range(360)
    ]
    (folder / "sales.csv").write_text("customer,sku,date,channel\n" + "\n".join(rows) + "\n")
    items = [f"S{n},c{n % 5},{n}.5" for n in range(3, 45)]
    (folder / "items.csv").write_text("sku,category,price\n" + "\n".join(items) + "\n")
    options = ["--items", folder / "items.csv", "--features", "category,price,channel"]
    done = train(folder, folder / "sales.csv", *options, "--steps", "4")
    assert done.returncode == 0, done.stderr
    return folder / "run", export(folder / "run", folder / "out")


def test_the_example_recommends_as_the_model(retrieval):
    run, out = retrieval
    model = freescale.load(run)
    histories = [[{"item": item, "time": time, "channel": "web"} for item, time in HISTORY]]
    codes = model.read(histories).past.features
    request = {
        "items": ["never seen", *(item for item, _ in HISTORY)],
        "times": [0, *(time for _, time in HISTORY)],
        "event_features": [[0], *codes.tolist()],
    }
    expected = model.recommend(histories, 10)
    found = run_example(out, request)
    assert [item for item, _ in found] == expected.items[0]
    np.testing.assert_allclose([float(score) for _, score in found], expected.scores[0], atol=1e-5)
    assert len(run_example(out)) == 10  # the request in serving.json


def test_serving_json_describes_the_folder(retrieval):
    run, out = retrieval
    about = json.loads((out / "serving.json").read_text())
    model = freescale.load(out)
    assert [each["name"] for each in about["inputs"]] == [
        "items", "lengths", "times", "event_features",
    ]  # fmt: skip
    assert about["inputs"][3]["shape"] == ["batch", "length", 1]
    assert about["time_unit"] == "s" and about["max_length"] == 20
    assert about["torch"] == torch.__version__ and about["normalize"]
    named = (about["vocabulary"], about["features"], about["items"]["ids"], about["program"])
    assert all((out / name).is_file() for name in named)
    ids = json.loads((out / "items.json").read_text())
    assert ids == model.items.ids.to_pylist() and len(ids) == about["items"]["count"]
    vectors = torch.load(out / "item_vectors.pt", mmap=True, weights_only=True)
    assert torch.equal(vectors, model.item_vectors())


def test_the_model_card(retrieval, tmp_path):
    run, out = retrieval
    card = json.loads((out / "model_card.json").read_text())
    (line,) = (x for x in (run / "metrics.jsonl").read_text().splitlines() if '"test"' in x)
    assert card["metrics"]["test"] == json.loads(line)["test"]
    assert card["name"] == "run" and card["step"] == 4 and card["task"] == "retrieval"
    assert card["data"]["users"] == 30 and card["data"]["events"] == 360
    assert card["data"]["features"]["item"] == ["category", "price"]
    assert card["data"]["source"] == "sales.csv"
    assert card["data"]["features"]["event"] == ["channel"] and len(card["limits"]) > 3
    # a checkpoint that was never evaluated has no metrics
    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "metrics.jsonl").unlink()
    bare = json.loads((export(copied, tmp_path / "a") / "model_card.json").read_text())
    assert bare["metrics"] == {}
    step = next(copied.joinpath("checkpoints").iterdir()).name
    for name, checkpoint in (("test", step), ("validation", "step-00000001")):
        result = {"checkpoint": checkpoint, "quality": {"model": {"hr@10": 0.25}}}
        (copied / f"eval-{name}.json").write_text(json.dumps(result))
    card = json.loads((export(copied, tmp_path / "b") / "model_card.json").read_text())
    assert card["metrics"] == {"test": {"model": {"hr@10": 0.25}}}


def test_a_ranking_model(tmp_path):
    random = np.random.default_rng(1)
    labels = {name: random.integers(0, 2, 480) for name in ("click", "buy")}
    data = interactions(tmp_path / "data.parquet", **labels)
    options = ["--task", "ranking", "--labels", "click,buy", "--encoder", "sasrec", "--steps", "2"]
    done = train(tmp_path, data, *options)
    assert done.returncode == 0, done.stderr
    out = export(tmp_path / "run", tmp_path / "out")
    assert not (out / "item_vectors.pt").exists()
    found = run_example(out, {"items": [3, 9, 4], "candidates": [7, 3]})
    (expected,) = freescale.load(out).score([[3, 9, 4]], [7, 3])
    assert [line[0] for line in found] == ["7", "3"]
    values = np.array([line[1:] for line in found], np.float32)
    np.testing.assert_allclose(values, expected, atol=1e-5)


def test_a_plain_export_replaces_one_for_serving(retrieval, tmp_path):
    run, out = retrieval
    out = shutil.copytree(out, tmp_path / "out")
    done = run_freescale("export", run, "--out", out, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert not any((out / name).exists() for name in ("encoder.pt2", "serving.json", "example.py"))
