"""Examples and commands that the documentation shows: they run as written."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from helpers.command import freescale
from helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def run_script(transport, path, folder):
    """What a script prints on this rank. Its `freescale.connect` joins the ranks that there are."""
    os.chdir(folder)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = [str(path)]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def run_freescale(*arguments):
    done = freescale(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_model_on_two_ranks(tmp_path):
    printed, _ = run_ranks(2, run_script, ROOT / "examples" / "own_model.py", tmp_path)
    lines = [line for line in printed.splitlines() if line.startswith("step")]
    losses = [float(line.split()[-1]) for line in lines]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "table item: 100,000 x 32, RowWiseAdagrad, sharded" in printed


def test_ranking_model_on_two_ranks(tmp_path):
    script = ROOT / "examples" / "ranking_model.py"
    printed, nothing = run_ranks(2, run_script, script, tmp_path)
    steps = [line.split() for line in printed.splitlines() if line.startswith("step")]
    assert [words[1] for words in steps] == ["0", "20", "40", "60"]
    first, last = (float(words[-1]) for words in (steps[0], steps[-1]))  # click accuracy
    assert first < 0.6 and last > 0.8
    assert "table items.item_features: 31 x 16, Adam, replicated" in printed and not nothing


def test_snippets_of_own_model(tmp_path):
    """docs/start/your_model.md, block after block, on two ranks."""
    page = (ROOT / "docs" / "start" / "your_model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
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
"""
    script = tmp_path / "snippets.py"
    script.write_text("\n".join([*blocks, checks]))
    printed, _ = run_ranks(2, run_script, script, tmp_path)
    assert "done 3" in printed


def test_snippet_of_features(tmp_path):
    """docs/guide/features.md, on two ranks."""
    page = (ROOT / "docs" / "guide" / "features.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    sys.path.insert(0, str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / "ranking_model.py"))["write_impressions"](
        tmp_path / "impressions.csv"
    )
    script = tmp_path / "snippet.py"
    block = block.replace("global_batch", 'cache="cache", global_batch')  # not the user's
    script.write_text(
        block + "\nassert len(losses) == len(data) == 34 and sum(losses[-5:]) < sum(losses[:5])"
    )
    run_ranks(2, run_script, script, tmp_path)


SETTING = """
import torch
import freescale
from freescale import Jagged, SequenceBatch

transport = freescale.connect("cpu")
torch.manual_seed(0)
sizes = dict(width=8, layers=1, heads=1, dropout=0.0, time_bias=False)
encoder = freescale.models.HSTU(max_length=8, **sizes)
model = freescale.models.Retrieval(encoder, num_items=40, num_actions=3)
"""
CHECKS = """
assert sharded.tables.specs["item"].rows == 40
print("done")
"""


def test_snippets_of_the_page_of_tables(tmp_path):
    """docs/how/embedding.md, on two ranks."""
    page = (ROOT / "docs" / "how" / "embedding.md").read_text(encoding="utf-8")
    parts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "snippets.py"
    script.write_text("\n".join([SETTING, *parts, CHECKS]))
    printed = run_ranks(2, run_script, script, tmp_path)
    assert all("done" in words for words in printed)


def test_generate_and_train_on_it(tmp_path):
    data, folder = tmp_path / "histories.parquet", tmp_path / "run"
    shape = "--users 160 --items 4000 --median 20 --cap 60 --collision 0.12 --global-batch 16"
    assert "160 users" in run_freescale("generate", data, *shape.split())
    options = "--global-batch 16 --steps 6 --width 8 --no-shuffle --split none --tensorboard"
    where = ["--folder", folder, "--device", "cpu"]
    run_freescale("train", "--data", data, *where, *options.split())
    assert json.loads((folder / "ledger.json").read_text())["steps"] == 6
    assert list((folder / "tensorboard").glob("events.*"))
