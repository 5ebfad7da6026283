"""Training on dynamic tables: staged equals serial to the bit at every moment, with admission and
eviction in every step; and a table that never evicts equals a static one."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from helpers.collisions import batch_of, bits
from helpers.dynamic_oracle import Oracle
from helpers.dynamic_streams import CHURN, RULES, build, state_of
from helpers.toys import Clicks

import freescale
from freescale.config import RunConfig
from freescale.embedding.dynamic import directory
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.storage.dynamic import DynamicStorage
from freescale.pipeline.single import Single
from freescale.pipeline.staged import Staged
from freescale.train.build import parse_tables
from freescale.transport.local import LocalTransport


def batches_of(stream):
    return [batch_of(ids, number) for number, ids in enumerate(stream)]


def train(schedule, rules, stream=CHURN, **options):
    parallel, pipeline = build(LocalTransport(), schedule, rules, **options)
    losses = [result.loss for result in pipeline.run(batches_of(stream))]
    pipeline.close()
    return losses, state_of(parallel)


def assert_same(actual, expected):
    assert actual[0] == expected[0] and len(expected[0]) > 0
    assert actual[1].keys() == expected[1].keys()
    differ = [n for n, value in expected[1].items() if not torch.equal(actual[1][n], value)]
    assert differ == []


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_staged_is_serial_to_the_bit(rules):
    assert_same(train(Staged, rules), train("serial", rules))


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_a_table_that_never_evicts_is_a_static_one(optimizer):
    stream = [[i % 190 for i in ids] for ids in CHURN]
    rules = freescale.Dynamic(190 * 40)
    for schedule in ("serial", Staged):
        losses, state = train(schedule, rules, stream, optimizer=optimizer)
        static, pipeline = build(LocalTransport(), schedule, None, optimizer=optimizer)
        assert losses == [result.loss for result in pipeline.run(batches_of(stream))]
        pipeline.close()
        rows = static.tables.get_group("item").rows
        seen = sorted({id for ids in stream for id in ids})
        assert state["item/ids"].tolist() == seen
        place = {id: at for at, id in enumerate(rows.get_ids("item").tolist())}
        order = torch.tensor([place[id] for id in seen])
        for part, value in rows.get_tensors("item").items():
            assert torch.equal(state[f"item/{part}"], bits(value[order])), part
        for name, value in static.module.named_parameters():
            assert torch.equal(state[name], bits(value)), name


def states_of_serial(rules, **options):
    """(loss, state) after each step."""
    parallel, pipeline = build(LocalTransport(), "serial", rules, **options)
    return [(result.loss, state_of(parallel)) for result in pipeline.run(batches_of(CHURN))]


@pytest.mark.parametrize(
    ("schedule", "ahead"), [(Staged, False), ("staged", False), ("staged", True)]
)
def test_between_any_two_steps_the_tables_are_those_of_serial(schedule, ahead, monkeypatch):
    """Seen by `flush`, and by evaluations, which change nothing; also when the loop is left and
    entered again. `ahead`: a single rank as on a GPU, where rows are made beside the compute."""
    monkeypatch.setattr(Single, "_ahead", ahead)
    other = [batch_of(ids, 99) for ids in CHURN[::5]]
    for rules in RULES:
        expected = states_of_serial(rules)
        parallel, pipeline = build(LocalTransport(), schedule, rules)
        source = iter(batches_of(CHURN))
        for leave in (2, 3, 8, 99):
            for result in pipeline.run(source):
                loss, state = expected[result.step - 1]
                if result.step % 2:
                    with parallel.reading(other[result.step % 3]) as batch:
                        parallel(batch)
                else:
                    pipeline.flush()
                assert_same(([result.loss], state_of(parallel)), ([loss], state))
                if result.step == leave:
                    break
        assert pipeline.steps == len(CHURN)
        pipeline.close()


def test_every_step_admits_evicts_and_turns_away():
    """What the streams above are about."""
    total = dict.fromkeys(
        ("inserted", "evicted", "swept", "turned_away", "waiting", "forgotten"), 0
    )
    for rules in RULES:
        _, pipeline = build(LocalTransport(), "serial", rules)
        list(pipeline.run(batches_of(CHURN)))
        for record in pipeline.ledger.drain():
            for name in total:
                total[name] += record["counters"].get(f"dynamic_{name}", 0)
    assert all(value > 10 for value in total.values()), total


def count_steps(schedule, rules, leaves=(99,)):
    """What the ledger has of the table in each step of a run that is left after some of them."""
    _, pipeline = build(LocalTransport(), schedule, rules)
    source = iter(batches_of(CHURN))
    for leave in leaves:
        for result in pipeline.run(source):
            if result.step == leave:
                break
    pipeline.close()
    return [
        {name: value for name, value in record["counters"].items() if name.startswith("dynamic_")}
        for record in pipeline.ledger.drain()
    ]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_step_counts_the_decisions_of_its_batch(rules, monkeypatch):
    """Once, however late the lane decides, or how often somebody leaves the run meanwhile."""
    decide, calls = DynamicStorage.resolve, itertools.count()

    def decide_late(*arguments):
        time.sleep(0.03 * (next(calls) % 2))  # into the next step of the ledger
        return decide(*arguments)

    expected = count_steps("serial", rules)
    assert len(expected) == len(CHURN)
    assert all(step["dynamic_rows"] <= step["dynamic_capacity"] for step in expected)
    assert expected[-1]["dynamic_rows"] > 0
    monkeypatch.setattr(DynamicStorage, "resolve", decide_late)
    assert count_steps(Staged, rules) == expected
    assert count_steps(Staged, rules, leaves=(2, 3, 8, 99)) == expected


def test_without_pins_the_staged_schedule_loses_updates(monkeypatch):
    """The control: rows go while their gradients are on the way, and the comparison sees it."""
    monkeypatch.setattr(directory, "PINNED", 1)
    expected, found = train("serial", RULES[0]), train(Staged, RULES[0])
    assert any(not torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_evaluation_reads_zeros_for_ids_without_a_row():
    parallel, pipeline = build(LocalTransport(), "serial", RULES[0])
    list(pipeline.run(batches_of(CHURN[:3])))
    known, unknown = CHURN[2][0], 123456789
    with parallel.reading(batch_of([known, unknown], 0)) as batch:
        rows = parallel.module.item(batch.values("history"))
    assert rows[0].abs().sum() > 0 and not rows[1].any()


def test_host_and_disk_placement_train_the_same_bits(tmp_path):
    expected = train("serial", RULES[1], optimizer="adam")
    cache = 8 * 8 * 3 * 200  # rows of three batches, beside the two without an id
    for tier, schedule in (
        (freescale.Host(cache), "serial"),
        (freescale.Host(cache), Staged),
        (freescale.Disk(str(tmp_path), cache), "staged"),
    ):
        placement = {"item": tier, "action": "sharded"}
        found = train(schedule, RULES[1], optimizer="adam", placement=placement)
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": {"thing": RULES[0]}}, "the tables are item"),
        ({"tables": {"item": 3}}, "freescale.Dynamic"),
        ({"tables": {"item": RULES[0]}, "placement": "replicated"}, "cannot be"),
        ({"tables": {"item": RULES[0]}, "init": "weights"}, "init='rows'"),
    ],
)
def test_mistakes_name_the_mend(options, message):
    with pytest.raises(ValueError, match=message):
        freescale.parallelize(Clicks(), Clicks.ids, **options)


class Negatives(Clicks):
    """Reads its last feature as negatives."""

    ids = {"item": ["history", "negatives"], "action": ["actions"]}

    def forward(self, batch):
        extra = batch.dense["negatives"]
        return super().forward(replace(batch, dense=batch.dense | {"extra": extra}))


def test_negatives_neither_count_nor_get_a_row():
    """Alone or beside the same id in the history, on every schedule."""
    stream = [batch_of(ids, number) for number, ids in enumerate(CHURN)]
    stream = [
        replace(batch, dense={"labels": batch.dense["labels"], "negatives": others})
        for number, batch in enumerate(stream)
        for others in [stream[(number + 3) % len(stream)].dense["extra"][: len(batch)]]
    ]
    oracle = Oracle(RULES[1])
    for batch in stream:
        seen = set(batch.values("history").tolist())
        ids = seen | set(batch.dense["negatives"].reshape(-1).tolist())
        oracle.plan(ids, ids - seen)
    found = []
    for schedule in ("serial", Staged, "staged"):
        parallel, pipeline = build(LocalTransport(), schedule, RULES[1], model=Negatives)
        losses = [result.loss for result in pipeline.run(stream)]
        pipeline.close()
        state = state_of(parallel)
        held = zip(*(state[f"item/{part}"].tolist() for part in ("ids", "last_use", "count")))
        assert sorted(held) == sorted(entry[2:] for entry in oracle.state())
        found.append((losses, state))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_what_the_page_shows():
    page = Path(__file__).parents[2] / "docs" / "how" / "dynamic.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = {"freescale": freescale, "transport": LocalTransport()}
    exec(snippet, names | (shown := {"model": Clicks(), "ids": Clicks.ids}), shown)
    (line,) = [line for line in shown["sharded"].tables.describe() if "item" in line]
    assert "50,003,968 x 8" in line and "admits after 3 batches" in line


def test_the_option_of_the_command_line():
    about = {"data": "x.parquet", "rows": "item=dynamic:1M:seen=2"}
    config = RunConfig.from_settings(about)
    assert config.data.in_batch_share == 1
    rules = freescale.Dynamic("1M", freescale.Seen(2))
    assert parse_tables(config) == {"item": replace(rules, draws="targets")}
    for other in (
        {"task": "ranking", "labels": "like"},
        {"in_batch_share": 1.0, "log_q": False},
    ):
        assert parse_tables(RunConfig.from_settings(about | other)) == {"item": rules}
    for wrong, message in (
        ({"negatives_from": "uniform"}, "--negatives-from uniform .*--in-batch-share 1"),
        ({"in_batch_share": 0.5}, "--negatives-from uniform .*--in-batch-share 1"),
        ({"negatives_from": "all"}, "--negatives-from all .*--in-batch-share 1"),
        ({"rows": "item"}, "item=dynamic:50M"),
        ({"rows": "item=host:8GB", "in_batch_share": 1.0}, "give dynamic:ROWS"),
        ({"rows": "item=dynamic:x", "in_batch_share": 1.0}, "--rows item=dynamic:x: 'x' is not"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_tables(RunConfig.from_settings(about | wrong))


def test_strings_become_ids():
    ids = freescale.data.hash_ids(["a", "b", "a", "", b"b", "\u00fc"])
    assert ids.dtype == torch.int64 and ids[0] == ids[2] and ids[1] == ids[4]
    assert ids.unique().numel() == 4
    assert ids[0].item() == int.from_bytes(
        blake2b(b"a", digest_size=8).digest(), "little", signed=True
    )
    assert freescale.data.hash_ids([]).shape == (0,)
