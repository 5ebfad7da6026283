"""`--keep best` and `--patience`: what stays, when a run stops, and that resuming is exact."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks

from freescale import Callback, RunConfig, Trainer
from freescale.data.synthetic.generate import generate
from freescale.recommend.export import export_run
from freescale.train.commands import evaluate_checkpoint
from freescale.train.position import Best
from freescale.train.sample_ranks import SampleRanks, write_ranks
from freescale.transport.local import LocalTransport

METRIC = "ndcg@10/unseen"
# What the validation part says after each epoch of 3 steps: the best is after step 9, and the
# third one without a better one after step 18.
SERIES = (0.1, 0.3, 0.5, 0.4, 0.5, 0.2, 0.9, 0.9)
LAST, BEST = 18, 9


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    return generate(path, users=48, items=40, median=8.0, cap=12, seed=1).path


def configure(data: Path, **settings: object) -> RunConfig:
    small = {"global_batch": 16, "width": 8, "layers": 1, "negatives": 4, "max_length": 12}
    asked = {"epochs": 8, "evaluate_every": 1, "keep": "best", "patience": 3, "log_every": 1}
    given = {
        "data": str(data),
        "device": "cpu",
        "keep_checkpoints": 1,
        "trace_steps": 0,
        **small,
        **asked,
    }
    return RunConfig.from_settings(given | settings)


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations as they are, but for the metric that is compared, which follows SERIES."""
    import freescale.train.run as module

    made: list[Trainer] = []
    evaluate = module.evaluate_part

    def evaluate_part(config, model, path, part, baseline=False, window=None):
        found = evaluate(config, model, path, part, baseline)
        if part == "validation":
            found["model"][METRIC] = SERIES[made[-1].epoch - 1]
        return found

    monkeypatch.setattr(module, "evaluate_part", evaluate_part)
    return made


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, step):
        if step.step == self.step:
            trainer.stop()


def run(made, config, folder, resume=False, stop=0):
    made.append(
        Trainer(
            config,
            folder,
            resume=resume,
            callbacks=[StopAfter(stop)],
            histories=Path(config.data.data),
            transport=LocalTransport(),
        )
    )
    return made[-1].train()


def read_metrics(folder: Path, last: int) -> list[dict]:
    """Without the test part of a run that was stopped before the `last` step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if "test" not in line or line["step"] == last]
    return [{k: v for k, v in line.items() if k != "samples_per_second"} for line in kept]


def export_weights(folder: Path, out: Path, name: str | None = None) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        f"{path.name}/{key}": value
        for path in export_run(folder, out, name)
        if path.suffix == ".safetensors"
        for key, value in load_file(path).items()
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_interrupted_and_resumed_keeps_the_same_best_and_stops_at_the_same_step(
    data, tmp_path, scripted
):
    config, whole = configure(data), tmp_path / "whole"
    results = run(scripted, config, whole)
    best = results["best"]
    assert best == {"metric": METRIC, "kept": True, "step": BEST, "value": 0.5, "since": 3}
    assert scripted[-1].step == LAST and scripted[-1].checkpoints.steps() == [BEST, LAST]
    expected = export_weights(whole, tmp_path / "out")
    assert_equal(export_weights(whole, tmp_path / "best", "best"), expected)
    later = export_weights(whole, tmp_path / "last", "last")
    assert any(not torch.equal(later[name], value) for name, value in expected.items())
    lines = read_metrics(whole, LAST)
    assert lines[-1]["of_step"] == BEST and lines[-2]["best"] == best
    # in the midst of an epoch before the best one; after two evaluations without a better one
    for stop in (7, 16):
        folder = tmp_path / str(stop)
        first = run(scripted, config, folder, stop=stop)
        assert first["best"]["step"] == (6 if stop == 7 else BEST)
        assert stop <= scripted[-1].step <= stop + 1
        again = run(scripted, config, folder, resume=True)
        assert again["best"] == best and again["test"] == results["test"]
        assert scripted[-1].step == LAST and scripted[-1].checkpoints.steps() == [BEST, LAST]
        assert read_metrics(folder, LAST) == lines
        assert_equal(export_weights(folder, tmp_path / f"out-{stop}"), expected)
    with pytest.raises(ValueError, match=r"ended at step 18, after 3 evaluations .* --patience"):
        run(scripted, config, folder, resume=True)
    # the best one is where a run may go on from, too; what followed is made again
    with pytest.warns(UserWarning, match="step-00000018 will be given up"):
        again = run(scripted, config, folder, resume="best")
    assert again["best"] == best and read_metrics(folder, LAST) == lines
    # with more patience the run goes on, as if that had been asked for from the start
    results = run(scripted, configure(data, patience=4), whole, resume=True)
    assert results["best"]["step"] == 21 and results["best"]["since"] == 1
    assert scripted[-1].step == 24 and scripted[-1].checkpoints.steps() == [21, 24]


def test_a_best_one_whose_checkpoint_has_gone_is_forgotten(data, tmp_path, scripted):
    """Step 18 names step 9 as the best, which went when step 21 was better."""
    settings = {"keep_checkpoints": 3, "checkpoint_every": 3, "patience": None}
    run(scripted, configure(data, **settings), tmp_path)
    assert scripted[-1].checkpoints.steps() == [18, 21, 24]
    with pytest.warns(UserWarning, match="step-00000021, step-00000024 will be given up"):
        results = run(scripted, configure(data, steps=20, **settings), tmp_path, resume="18")
    assert results["best"]["step"] is None and results["test"]
    assert any("best checkpoint, step 9, has gone" in note for note in scripted[-1].notes)


def test_names_of_checkpoints(data, tmp_path, scripted):
    config = configure(data, keep="latest", patience=None, epochs=2)
    run(scripted, config, tmp_path)
    checkpoints = scripted[-1].checkpoints
    assert checkpoints.steps() == [6]
    for name in (None, "last", "6", "step-00000006"):
        assert checkpoints.find(name).path.name == "step-00000006"
    for name, words in (
        ("best", "the run was not trained with --keep best"),
        ("3", "no checkpoint of step 3; it has 6"),
        ("worst", "'worst' names no checkpoint: say last, best or a step"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoints.find(name)


def test_best():
    best = Best("ne/click", kept=False)
    values = (math.nan, 0.9, 0.8, 0.8, 0.7, 0.75)
    assert [best.note(step, {"ne/click": value}) for step, value in enumerate(values)] == [
        *(False, True, True, False, True, False)
    ]
    assert not best.note(9, {}) and (best.step, best.value, best.since) == (4, 0.7, 2)
    again = Best("ne/click", kept=False)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert again == best
    for other in (Best("auc/click", kept=False), Best("ne/click", kept=True)):
        other.load_state_dict(best.state_dict())
        assert other.step is None and other.since == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluate_every": None}, "--keep best needs --evaluate-every"),
        ({"keep": "latest", "evaluate_every": None}, "--patience needs --evaluate-every"),
        ({"split": "none"}, "--keep best needs a validation part"),
        ({"keep_metric": "hr@11"}, r"--keep-metric hr@11 is no metric .*; there is hr@K, ndcg@K"),
        ({"keep_metric": "repeats"}, "no metric of retrieval that gets better"),
        ({"keep_metric": "auc/like", "task": "ranking", "labels": "click"}, "there is ne/click, a"),
    ],
)
def test_what_cannot_be_compared_is_refused(data, settings, words):
    given = {"data": str(data), "evaluate_every": 1, "keep": "best", "patience": 2} | settings
    with pytest.raises(ValueError, match=words):
        RunConfig.from_settings(given)


def test_an_empty_dynamic_table_is_not_the_best(data, tmp_path):
    """Its ids are admitted after the second evaluation: until then it finds nothing."""
    config = configure(data, rows="item=dynamic:4096:seen=6", epochs=4, patience=None)
    trainer = Trainer(config, tmp_path, histories=data, transport=LocalTransport())
    results = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line["validation"]["model"] for line in lines if "validation" in line]
    assert found[0][METRIC] == found[0]["hr@200"] == 0
    assert results["best"]["value"] == max(values[METRIC] for values in found) > 0
    assert results["test"]["model"]["hr@200"] > 0


def test_a_target_without_a_row_has_no_rank_in_the_file(data, tmp_path):
    config = configure(data, rows="item=dynamic:4096:seen=6", steps=6, keep="latest", patience=None)
    Trainer(config, tmp_path, histories=data, transport=LocalTransport()).train()
    found = SampleRanks()
    _, _, quality = evaluate_checkpoint(
        config, tmp_path, "test", data, LocalTransport(), keep=found
    )
    write_ranks(tmp_path / "ranks.csv", data, found)
    with open(tmp_path / "ranks.csv", encoding="utf-8") as file:
        ranks = [line["rank"] for line in csv.DictReader(file)]
    assert 0 < ranks.count("") < len(ranks)
    hits = sum(rank != "" and int(rank) <= 10 for rank in ranks)
    assert quality["model"]["hr@10"] == pytest.approx(hits / len(ranks))


def evaluated_before(transport, data, folder, parts, rows):
    config = configure(data, rows=rows, epochs=2, patience=None)
    trainer = Trainer(config, folder, histories=data, transport=transport)
    before = [trainer.evaluate(part)["model"]["hr@10"] for part in parts]
    assert transport.rank or not Path(folder).exists()
    results = trainer.train()
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("samples_per_second", None)
    return before, results["loss"], results["test"], results["best"], lines


@pytest.mark.parametrize("rows", [None, "item=dynamic:4096"])
@pytest.mark.parametrize("world", [1, 2])
def test_evaluating_before_training_changes_nothing(data, tmp_path, world, rows):
    plain = run_ranks(world, evaluated_before, data, tmp_path / "plain", (), rows)
    parts = ("test", "validation")
    evaluated = run_ranks(world, evaluated_before, data, tmp_path / "evaluated", parts, rows)
    for expected, found in zip(plain, evaluated, strict=True):
        assert found[1:] == expected[1:]
        assert rows is None or found[0] == [0.0, 0.0]
