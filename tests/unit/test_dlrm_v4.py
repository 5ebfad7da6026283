"""DLRMv4 from generated data to MLPerf's log: the recipe in small, and every line of the log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from freescale_bench.dlrm.generate import generate_yambda

from freescale.config import RunConfig
from freescale.train import mlperf_log
from freescale.train.mlperf_log import TOKEN, MLPerfLog
from freescale.train.trainer import Trainer

FEATURES = (
    "artist=id,album=id,user=id:41,user*artist=cross:1000,user*album=cross:400,"
    "user*hour=cross:240,item*hour=cross:400,artist*hour=cross:320,user*is_organic=cross:80,"
    "user*artist*hour=cross:400"
)
SMALL = {
    "features": FEATURES, "num_items": 301, "width": 8, "layers": 1, "heads": 2, "max_length": 20,
    "min_history": 5, "window": "4000000", "windows": 3, "global_batch": 16, "device": "cpu",
    "profile_steps": 0, "checkpoint_every": 100,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yambda")
    generate_yambda(folder / "y", users=40, items=300, median=40, cap=90)
    return {"data": str(folder / "y"), "cache": str(folder / "cache"), "recipe": "dlrm-v4"}


def read_log(path):
    lines = path.read_text().splitlines()
    assert all(line.startswith(TOKEN) for line in lines)
    return [json.loads(line.removeprefix(TOKEN)) for line in lines]


def check_form(entries):
    """What MLPerf's checker demands of a line, and of the order of the events."""
    for entry in entries:
        assert list(entry) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        end = entry["key"].rpartition("_")[2]
        kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
        assert entry["event_type"] == kinds.get(end, "POINT_IN_TIME")
        assert isinstance(entry["time_ms"], int) and "lineno" in entry["metadata"]
        if entry["key"].startswith(("block", "eval_")) and entry["key"] != "eval_every_data_pct":
            assert entry["key"] == "eval_samples" or entry["metadata"]["samples_count"] >= 0
    times = [entry["time_ms"] for entry in entries if not entry["key"].endswith("_stop")]
    assert times == sorted(times)
    keys = [entry["key"] for entry in entries]
    for key in ("init_start", "init_stop", "run_start", "run_stop", "global_batch_size"):
        assert keys.count(key) == 1, key
    marks = [key for key in keys if key.startswith(("init", "run", "block", "eval_a", "eval_st"))]
    assert marks[:4] == ["init_start", "init_stop", "run_start", "block_start"]
    block = ["block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    rest = marks[4:]
    while rest[:4] == block:
        rest = rest[5:] if rest[4] == "block_start" else rest[4:]
    assert rest in (["run_stop"], ["block_stop", "run_stop"])


def test_a_small_run_of_the_recipe_writes_the_log(data, tmp_path):
    path = tmp_path / "logs" / "mlperf.txt"
    config = RunConfig.from_settings(data | SMALL | {"mlperf_log": str(path)})
    trainer = Trainer(config, tmp_path / "run")
    places = next(iter(trainer.data)).sequences["context_features"].values
    assert places.shape[1] == 8 and trainer.model.module.context_features is not None
    results = trainer.train()
    assert torch.isfinite(torch.tensor(results["loss"]))
    entries = read_log(path)
    check_form(entries)
    found = {entry["key"]: entry["value"] for entry in entries}
    expected = {
        "submission_benchmark": "dlrmv4", "global_batch_size": 16, "seed": 1,
        "train_samples": trainer.data.num_samples,
        "opt_name": "Adam", "opt_base_learning_rate": 1e-6, "opt_adam_beta_1": 0.95,
        "opt_adam_beta_2": 0.999, "opt_adam_epsilon": 1e-8, "opt_weight_decay": 0.0,
        "opt_gradient_clip_norm": 1.0, "opt_sparse_name": "RowWiseAdagrad",
        "opt_sparse_base_learning_rate": 1e-6, "opt_sparse_epsilon": 1e-8,
        "opt_learning_rate_warmup_steps": 24000, "opt_learning_rate_warmup_start_lr": 0.0,
        "lowest_numerical_precision_in_linear": "fp32", "config_filename": "dlrm-v4",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    counts = [e["metadata"]["samples_count"] for e in entries if e["key"] == "eval_accuracy"]
    first, second, _ = trainer.data._sizes  # of the windows, each evaluated before it is trained
    assert counts == [first, first + second]
    last = entries[-1]
    assert last["key"] == "run_stop" and last["metadata"]["status"] == "aborted"
    values = [e["value"] for e in entries if e["key"] == "eval_accuracy"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    aucs = [e["validation"]["model"]["auc/listen_plus"] for e in lines if "validation" in e]
    assert values == aucs


def test_the_run_ends_at_the_target_and_a_resumed_one_goes_on_with_its_log(
    data, tmp_path, monkeypatch
):
    path, folder = tmp_path / "mlperf.txt", tmp_path / "run"
    config = RunConfig.from_settings(data | SMALL | {"mlperf_log": str(path), "steps": 3})
    Trainer(config, folder).train()
    first = read_log(path)
    monkeypatch.setattr(mlperf_log.MLPerfLog.__init__, "__defaults__", (0.0,))
    longer = RunConfig.from_settings(data | SMALL | {"mlperf_log": str(path)})
    again = Trainer(longer, folder, resume=True)
    again.train()
    assert again.step < 40  # of 58: stopped after the evaluation that ends its first window
    entries = read_log(path)
    assert entries[: len(first)] == first
    more = entries[len(first) :]
    assert [e["key"] for e in more] == [
        *("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop")
    ]
    assert more[-1]["metadata"]["status"] == "success" and more[3]["metadata"]["samples_count"] > 40


def test_only_rank_0_writes_and_only_ranking_has_an_auc(data, tmp_path):
    config = RunConfig.from_settings(data)
    log = MLPerfLog(tmp_path / "log", config, 0.5)
    stopped = []
    run = SimpleNamespace(
        rank=1, step=0, config=config, data=SimpleNamespace(num_samples=10),
        stop=lambda: stopped.append(True),
    )  # fmt: skip
    log.on_start(run)
    log.on_evaluation(run, {"model": {"auc/listen_plus": 0.6}}, "test")
    assert not stopped
    log.on_evaluation(run, {"model": {"auc/listen_plus": 0.6}}, "validation")
    log.on_end(run, {})
    assert stopped and not (tmp_path / "log").exists()
    with pytest.raises(ValueError, match="--mlperf-log needs --task ranking"):
        MLPerfLog(tmp_path / "log", RunConfig.from_settings({"data": "x"}))


@pytest.mark.parametrize("auc", [float("nan"), 0.2])
def test_an_auc_below_the_target_ends_nothing(data, tmp_path, auc):
    log = MLPerfLog(tmp_path / "log", RunConfig.from_settings(data))
    run = SimpleNamespace(rank=0, data=SimpleNamespace(num_samples=10), stop=None)
    log.on_evaluation(run, {"model": {"auc/listen_plus": auc}}, "validation")
    found = read_log(tmp_path / "log")
    assert [e["key"] for e in found][-1] == "block_start" and found[2]["value"] in (None, auc)


def test_the_guide_generates_data(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[2] / "docs" / "guide" / "dlrm_v4.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, str(page), "exec"), {})
    words = capsys.readouterr().out.split()
    assert words[-3:] == ["rowwise_adagrad", "24000", "32"] and 0.7 < float(words[6]) < 1
    assert (tmp_path / "small" / "truth.json").is_file()
