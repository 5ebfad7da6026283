"""Training over segments on two ranks, from the command line: stopped and resumed it writes what an
uninterrupted run writes."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.command import freescale as command
from helpers.ranks import run_ranks
from helpers.small_runs import interactions, metrics, train

import freescale
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.data.ingest.prepare import prepare
from freescale.train.build import build_balancer, build_model, load_histories

CUT = [
    "--segment",
    4,
    "--segment-tokens",
    2,
    "--segment-weight",
    1.5,
    "--segment-pooling",
    "--max-length",
    20,
]


def test_train_resume_eval(tmp_path):
    data = interactions(tmp_path / "events.parquet")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = train(tmp_path / "a", data, *CUT, "--nproc", 2, "--epochs", 3)
    assert whole.returncode == 0, whole.stderr
    first = train(tmp_path / "b", data, *CUT, "--nproc", 2, "--epochs", 3, "--steps", 4)
    assert first.returncode == 0, first.stderr
    again = command(
        "train", "--folder", tmp_path / "b" / "run", "--resume", "--nproc", 2, "--steps", 9
    )
    assert again.returncode == 0, again.stderr
    expected = metrics(tmp_path / "a")
    assert expected[-1]["step"] == 9
    assert [m for m in metrics(tmp_path / "b") if m.get("step") != 4 or "test" not in m] == expected
    evaluated = command("eval", tmp_path / "a" / "run", "--device", "cpu")
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads((tmp_path / "a" / "run" / "eval-test.json").read_text())["quality"]["model"]
    assert found == pytest.approx(expected[-1]["test"]["model"], rel=1e-6)


def test_refused(tmp_path):
    data = interactions(tmp_path / "events.parquet")
    done = train(tmp_path, data, "--segment", 4, "--segment-tokens", 5)
    assert (
        done.returncode == 1
        and "--segment-tokens 5 are more than the events of a segment" in done.stderr
    )
    assert not (tmp_path / "run").exists()


def one_step(transport, path, balance):
    """The dense parameters before and after a step of SGD."""
    config = RunConfig(
        DataConfig(data="x", max_length=12, negatives=4, shuffle=False),
        ModelConfig(width=8, segment=3, segment_tokens=2, segment_weight=1.5, segment_pooling=True),
        TrainConfig(global_batch=32, device="cpu", balance=balance),
    )
    data = load_histories(config, path, transport)
    parallel = build_model(config, data, transport)
    parallel.module.double()
    before = {name: value.detach().clone() for name, value in parallel.module.named_parameters()}
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=1.0)
    balancer = build_balancer(config, transport.device)
    if balancer is not None:
        balancer.least_gain = 0.0  # so few samples would stay where they are
    pipeline = freescale.Pipeline(parallel, optimizer, balance=balancer)
    list(pipeline.run([data.batch(0)]))
    return {
        name: value.detach() - before[name] for name, value in parallel.module.named_parameters()
    }


def test_ranks_and_balancing_do_not_matter(tmp_path):
    """A step of two balanced ranks moves the dense parameters, summaries among them, as one rank
    moves them."""
    path = prepare(
        str(interactions(tmp_path / "events.parquet")), tmp_path / "cache", "auto", None, None
    )
    alone = run_ranks(1, one_step, path, "none")[0]
    assert alone["encoder.summaries"].abs().max() > 1e-6
    for found in run_ranks(2, one_step, path, "greedy"):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)
