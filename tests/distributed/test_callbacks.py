"""Callbacks of the Trainer: what they see, how they stop a run, and what happens if one fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.ranks import run_ranks

from freescale import Callback, RunConfig, Trainer
from freescale.data.synthetic.generate import generate
from freescale.transport.failures import RemoteError
from freescale.transport.local import LocalTransport

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    return generate(path, users=48, items=40, median=8.0, cap=12, seed=1).path


def configure(data: Path, **settings: object) -> RunConfig:
    small = {"global_batch": 16, "max_length": 10, "negatives": 4, "width": 8, "layers": 1}
    given = {"data": str(data), "trace_steps": 0, "device": "cpu", **small, **settings}
    return RunConfig.from_settings(given)


class Recorder(Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def on_start(self, trainer):
        self.calls.append(("start", trainer.step, trainer.folder.exists()))

    def on_step(self, trainer, step):
        assert step.step == trainer.step
        self.calls.append(("step", step.step))

    def on_log(self, trainer, entry):
        self.calls.append(("log", entry["step"], entry["loss"]))

    def on_evaluation(self, trainer, metrics, part):
        self.calls.append(("evaluation", trainer.step, part, metrics["model"]["hr@10"]))

    def on_checkpoint(self, trainer, path):
        self.calls.append(("checkpoint", path.name, (path / "state.json").exists()))

    def on_end(self, trainer, results):
        self.calls.append(("end", trainer.step, results["loss"]))


def test_a_callback_sees_every_step_evaluation_and_checkpoint(data, tmp_path):
    """What it sees is what metrics.jsonl holds; the order is that of the run."""
    recorder = Recorder()
    config = configure(data, epochs=2, evaluate_every=1, checkpoint_every=2, log_every=2)
    trainer = Trainer(
        config, tmp_path, callbacks=[recorder], histories=data, transport=LocalTransport()
    )
    results = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    validated = {
        line["step"]: line["validation"]["model"]["hr@10"] for line in lines if "validation" in line
    }
    assert set(losses) == {2, 4, 6} and set(validated) == {3, 6}
    assert recorder.calls == [
        ("start", 0, True),
        ("step", 1),
        ("step", 2),
        ("log", 2, losses[2]),
        ("checkpoint", "step-00000002", True),
        ("step", 3),
        ("evaluation", 3, "validation", validated[3]),
        ("step", 4),
        ("log", 4, losses[4]),
        ("checkpoint", "step-00000004", True),
        ("step", 5),
        ("step", 6),
        ("log", 6, losses[6]),
        ("evaluation", 6, "validation", validated[6]),
        ("checkpoint", "step-00000006", True),
        ("evaluation", 6, "test", lines[-1]["test"]["model"]["hr@10"]),
        ("end", 6, losses[6]),
    ]
    assert results["loss"] == losses[6]


class StopAtSecondEvaluation(Callback):
    """Early stopping: ends the run when a metric is no longer better than `best`."""

    def __init__(self, best: float) -> None:
        self.seen: list[float] = []
        self.best = best

    def on_evaluation(self, trainer, metrics, part):
        if part == "validation":
            self.seen.append(metrics["model"]["hr@10"])
            # One rank is enough, although all of them see the same metrics.
            if trainer.rank == 1 and len(self.seen) > 1 and self.seen[-1] <= self.best:
                trainer.stop()


def _stop_early(transport, data: Path, folder: Path, best: float):
    stopper, recorder = StopAtSecondEvaluation(best), Recorder()
    config = configure(data, epochs=8, evaluate_every=1)
    trainer = Trainer(
        config, folder, callbacks=[stopper, recorder], histories=data, transport=transport
    )
    results = trainer.train()
    steps = [call[1] for call in recorder.calls if call[0] == "step"]
    saved = trainer.checkpoints.steps()
    return steps, stopper.seen, results["stopped"], "test" in results, saved


def _stop_by_patience(transport, data: Path, folder: Path):
    # 40 items: all are among the first 200, and no evaluation is better than the first
    best = {"keep": "best", "keep_metric": "hr@200", "patience": 1}
    config = configure(data, epochs=8, evaluate_every=1, **best)
    trainer = Trainer(config, folder, histories=data, transport=transport)
    results = trainer.train()
    return trainer.step, results["best"], results["test"], trainer.checkpoints.steps()


def _stop_both_ways(transport, data: Path, folder: Path, best: float):
    return (
        _stop_early(transport, data, folder / "run", best),
        _stop_by_patience(transport, data, folder / "patient"),
    )


def test_a_callback_or_patience_stops_all_ranks_by_a_metric(data, tmp_path):
    """An epoch has 3 steps: the second evaluation is after step 6 of 24."""
    first, second = run_ranks(2, _stop_both_ways, data, tmp_path, 1.0)
    assert first == second
    steps, seen, signal, tested, saved = first[0]
    assert 6 <= steps[-1] <= 9 and len(seen) >= 2 and steps == list(range(1, steps[-1] + 1))
    assert signal == 0 and tested and saved == steps[-1:]
    last, best, _, saved = first[1]
    assert last == 6 and best["step"] == 3 and saved == [3, 6]  # right after the second evaluation


class Failing(Callback):
    """Raises at a hook, on rank 1 only."""

    def __init__(self, hook: str) -> None:
        self.calls = 0
        setattr(self, hook, self._fail)

    def _fail(self, trainer, *_):
        self.calls += 1
        if trainer.rank == 1:
            raise LookupError("the registry is gone")


def _fail_each(transport, data: Path, folder: Path):
    """(type, words, calls, step, checkpoints) of each hook's failure, on this rank."""
    found = []
    for hook in ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end"):
        failing = Failing(hook)
        every = {"evaluate_every": 1, "checkpoint_every": 1, "keep_checkpoints": 9}
        config = configure(data, epochs=4, log_every=100, **every)
        trainer = Trainer(
            config, folder / hook, callbacks=[failing], histories=data, transport=transport
        )
        with pytest.raises((LookupError, RemoteError)) as caught:
            trainer.train()
        found.append(
            (
                type(caught.value).__name__,
                str(caught.value),
                failing.calls,
                trainer.step,
                trainer.checkpoints.steps(),
            )
        )
    return found


def test_an_exception_in_a_callback_ends_the_run_on_all_ranks(data, tmp_path):
    """With its words; within three steps; without another checkpoint, although one is due at each
    of them."""
    others, own = run_ranks(2, _fail_each, data, tmp_path)
    assert {name for name, *_ in own} == {"LookupError"}
    assert {words for _, words, *_ in own} == {"the registry is gone"}
    assert {calls for _, _, calls, *_ in own} == {1}, "a failed callback is not called again"
    assert {name for name, *_ in others} == {"RemoteError"}
    assert {words for _, words, *_ in others} == {
        "rank 1 stopped: LookupError: the registry is gone"
    }
    ends = [(step, saved) for *_, step, saved in own]
    assert ends == [(step, saved) for *_, step, saved in others]
    (at_start, at_step, at_evaluation, at_checkpoint, at_end) = ends
    assert at_start == (0, [])
    assert 1 <= at_step[0] <= 4 and at_step[1] == []
    assert 3 <= at_evaluation[0] <= 6 and at_evaluation[1] == [1, 2]
    assert 1 <= at_checkpoint[0] <= 4 and at_checkpoint[1] == [1]
    assert at_end[0] == 12 and at_end[1][-1] == 12


class FailAt(Callback):
    """Once the last snapshot is complete."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, step):
        if trainer.snapshots.taking is not None:
            trainer.snapshots.taking.done.wait()
        if step.step == self.step:
            raise LookupError("the registry is gone")


def test_nothing_is_kept_in_memory_after_an_exception_in_a_callback(data, tmp_path):
    """A restart makes the steps that no hook has seen again."""

    def build(*callbacks: Callback) -> Trainer:
        config = configure(data, epochs=4, log_every=1, snapshot_every=1, split="none")
        run = {"histories": data, "transport": LocalTransport()}
        return Trainer(config, tmp_path, resume="auto", callbacks=callbacks, **run)

    for step, last in ((1, None), (4, 3)):
        failing = build(FailAt(step))
        with pytest.raises(LookupError):
            failing.train()
        taken = failing.snapshots.taking
        assert (None if taken is None else taken.step) == last
    resumed = build()
    assert any("resumed after step 3, from memory" in note for note in resumed.notes)
    resumed.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))


def test_the_snippet_of_the_documentation_runs(data, tmp_path, monkeypatch, capsys):
    """docs/guide/training.md, with `histories.parquet` in the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "histories.parquet").write_bytes(data.read_bytes())
    text = (ROOT / "docs" / "guide" / "training.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(block, "docs/guide/training.md", "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer, Trainer) and trainer.folder.is_relative_to("runs")
    assert trainer.checkpoints.steps() == [trainer.step] and trainer.step <= 60
    assert "hr@10" in capsys.readouterr().out
