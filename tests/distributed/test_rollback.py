"""`--on-nonfinite rollback`: the run goes on from the last checkpoint as if the batch had never
been there; a second time it stops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.training import gather_tables

from freescale import RunConfig, Trainer
from freescale.data.batches.loader import Histories
from freescale.data.synthetic.generate import generate
from freescale.transport.local import LocalTransport

BAD = 6  # the number of a batch; 3 are an epoch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "histories.parquet"
    return generate(path, users=48, items=40, median=8.0, cap=12, seed=1).path


def configure(data: Path, **settings: object) -> RunConfig:
    given = {"global_batch": 16, "width": 8, "layers": 1, "negatives": 4, "max_length": 12}
    given |= {"data": str(data), "device": "cpu", "epochs": 4, "checkpoint_every": 4}
    given |= {"trace_steps": 0, "log_every": 1, "split": "none", "placement": "sharded"}
    return RunConfig.from_settings({**given, "on_nonfinite": "rollback", **settings})


def poison(*numbers: int):
    """Histories.batch that makes the loss of some batches not a number."""
    whole = Histories.batch

    def batch(self, number):
        made = whole(self, number)
        if number in numbers:
            weights = {task: weight * float("nan") for task, weight in made.weights.items()}
            made = replace(made, weights=weights)
        return made

    return batch


def leave_out(bad: int):
    """Histories.batch of data that never had the batch: the oracle."""
    whole = Histories.batch
    return lambda self, number: whole(self, number + (number >= bad))


def train(transport, data: Path, folder: Path, batch, **settings: object):
    """Losses and tables of a run on such batches."""
    whole, Histories.batch = Histories.batch, batch
    try:
        trainer = Trainer(configure(data, **settings), folder, histories=data, transport=transport)
        trainer.train()
    finally:
        Histories.batch = whole
    return gather_tables(trainer.model), trainer.step


def read_lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _compare(transport, data: Path, folder: Path) -> None:
    tables, steps = train(transport, data, folder / "run", poison(BAD))
    expected, made = train(transport, data, folder / "expected", leave_out(BAD), steps=11)
    assert steps == made == 11
    for name, table in expected.items():
        assert table.equal(tables[name]), name


def test_two_ranks_go_on_as_if_the_batch_had_not_been_there(data, tmp_path):
    run_ranks(2, _compare, data, tmp_path)
    (back,) = [line for line in read_lines(tmp_path / "run") if "rollback" in line]
    expected = {"at_step": BAD + 1, "loss": "nan", "skipped_batch": BAD}
    assert back == {"step": 4, "rollback": expected}
    pairs = [
        [(line["step"], line["loss"]) for line in read_lines(tmp_path / run) if "loss" in line]
        for run in ("run", "expected")
    ]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 11
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(11))


@pytest.mark.parametrize(
    ("bad", "settings"),
    [
        ((6,), {"on_nonfinite": "stop"}),
        ((2,), {}),  # there is no checkpoint yet
        ((6, 9), {}),  # once is enough
    ],
)
def test_it_stops_otherwise(bad, settings, data, tmp_path):
    with pytest.raises(ValueError, match=f"the loss is nan at step {max(bad) + 1 - len(bad) + 1}"):
        train(LocalTransport(), data, tmp_path / "run", poison(*bad), **settings)


def test_a_run_that_is_resumed_later_knows_what_was_left_out(data, tmp_path):
    run, transport = tmp_path / "run", LocalTransport()
    train(transport, data, run, poison(BAD), steps=8)
    resumed = Trainer(configure(data), run, resume=True, histories=data, transport=transport)
    assert resumed.total == 11 and resumed.step == 8 and resumed.epoch == 3
    resumed.train()
    expected, _ = train(LocalTransport(), data, tmp_path / "expected", leave_out(BAD), steps=11)
    for name, table in gather_tables(resumed.model).items():
        assert table.equal(expected[name]), name
