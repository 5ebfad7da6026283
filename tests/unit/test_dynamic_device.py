"""The map of a dynamic table on the device: its decisions are those of the host's directory, for
the plain twins by generated streams and for the Triton kernels through the interpreter; and it
trains the same bits."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from helpers import dynamic_storage_cases, id_map_cases, interpreter
from helpers import plain_id_map as id_map
from helpers.collisions import batch_of
from helpers.dynamic_oracle import FineDynamic
from helpers.dynamic_streams import CHURN, RULES, SPECIAL, build, id_in, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.config import DataConfig, RunConfig
from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.draws import DrawCounts
from freescale.embedding.dynamic_rules import (
    ENTRY_BYTES,
    SHARDS,
    After,
    Dynamic,
    Seen,
    parse_dynamic,
)
from freescale.embedding.layout import TableSpec, compute_keys
from freescale.embedding.storage import opening
from freescale.embedding.storage.api import TableRange
from freescale.embedding.storage.device import DeviceStorage
from freescale.embedding.storage.dynamic import EXTRA_ROWS, DynamicStorage
from freescale.kernels.jit.compile import find_versions
from freescale.kernels.jit.launch import record_launches
from freescale.kernels.row_moves import triton as row_exchange
from freescale.pipeline.staged import Staged
from freescale.train.build import build_row_optimizer
from freescale.train.compile_kernels import call_draws, call_id_map, call_row_exchange
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport

FIGURES = ("inserted", "evicted", "swept", "turned_away")


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(id_map_cases.__file__)


@pytest.mark.parametrize("case", id_map_cases.CASES)
def test_the_kernels_decide_as_the_host(interpreted, case):
    found = interpreted[case]
    assert all(value for name, value in found.items() if name not in FIGURES), found


def test_streams_of_the_kernels_evict_sweep_and_turn_away(interpreted):
    streams = [interpreted[case] for case in (*id_map_cases.STREAMS, "crowded")]
    for name in FIGURES:
        assert sum(found[name] for found in streams) > 3, name


@pytest.fixture(scope="module")
def interpreted_storage():
    return interpreter.interpreted(dynamic_storage_cases.__file__)


@pytest.mark.parametrize("case", dynamic_storage_cases.CASES)
def test_rows_are_those_of_the_host_map(interpreted_storage, case):
    found = interpreted_storage[case]
    assert found["steps"] and found["ahead"] and found["evicted"] > 3, found


POOL = [id_in(shard, number) for shard in (0, 1, 2) for number in range(12)] + SPECIAL
KEYS = compute_keys(torch.tensor(POOL))
BATCH = st.lists(st.tuples(st.integers(0, len(POOL) - 1), st.booleans()), max_size=30)
STREAM = st.lists(st.tuples(BATCH, st.booleans()), min_size=1, max_size=12)


RULE = st.builds(
    FineDynamic,
    capacity=st.sampled_from([1, 3 * SHARDS, 5 * SHARDS]),
    admit=st.builds(Seen, st.integers(1, 3), st.sampled_from([None, SHARDS, 2 * SHARDS])),
    evict=st.one_of(st.sampled_from(["lru", "lfu"]), st.builds(After, st.integers(3, 6))),
)


@given(rules=RULE, stream=STREAM, undone=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_the_twins_decide_as_the_host(rules, stream, undone):
    with id_map_cases.by_kernels(id_map):
        pair = id_map_cases.Pair(rules, (0, SHARDS))
    for batch, marked in stream:
        keys = KEYS[torch.tensor([number for number, _ in batch], dtype=torch.int64)]
        counted = torch.tensor([counts for _, counts in batch], dtype=torch.uint8)
        decided, same = pair.decide(keys, counted if marked else None)
        assert same
        for _ in range(undone):
            assert pair.undo(decided) and pair.same_answers(KEYS)
            assert pair.redo(decided) and pair.same_answers(KEYS)


@pytest.mark.parametrize("rows", [1000, 5000, 20_000])
def test_the_twins_hold_what_the_host_holds_of_small_tables(rows):
    """By the same rule: the number of shards follows the capacity."""
    rules = Dynamic(rows)
    with id_map_cases.by_kernels(id_map):
        pair = id_map_cases.Pair(rules, (0, rules.shards))
    for keys in compute_keys(torch.arange(rows) * 3).chunk(5):
        assert pair.decide(keys)[1]
    assert pair.device.used >= 0.9 * rows


def test_ids_and_keys_are_bijective():
    assert torch.equal(id_map.compute_ids(KEYS), torch.tensor(POOL))


@pytest.mark.parametrize("rows", [1, 3, 4, 1000, 12208])
def test_memory_beside_the_rows(rows):
    """Ids, last uses and counts are 16 bytes a row; the buckets are the rest."""
    from freescale.kernels.id_map import triton as triton_id_map

    buckets = triton_id_map.count_buckets(rows)
    assert buckets * 7 >= rows
    if rows >= 4:
        assert 16 + buckets * 32 / rows <= ENTRY_BYTES


H200 = ("cuda", 90, 32)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux alone")
@pytest.mark.parametrize("evict", ["lru", "lfu", "after=3", "seen=2"])
def test_kernels_are_compiled_before_the_first_step(evict):
    """All that a directory launches, whatever the sizes, is among what is made ready."""
    rules = parse_dynamic(f"dynamic:5000000:{evict}:map=device")
    config = RunConfig(data=DataConfig(data="synthetic"))
    with record_launches() as launches:
        directory = DeviceDirectory(rules, 3, 6, torch.device("cpu"))
        for keys in (KEYS, KEYS[1:2], KEYS[:16]):
            for counted in (None, torch.ones_like(keys, dtype=torch.uint8)):
                decided = directory.decide(keys, counted)
                directory.undo(decided.changes)
                directory.find(keys)
        directory.rebuild()
        weight = torch.zeros(5, config.model.width)
        directory.read(KEYS[1:4], weight, torch.float32, absent=3)
        part = TableRange(TableSpec("item", 5, config.model.width, torch.float32, ()), 0, 0, 5)
        inner = DeviceStorage([part], 5 + EXTRA_ROWS, build_row_optimizer(config), weight.device)
        storage = DynamicStorage(inner, directory)
        for room in (0, 2):
            storage._drawn._insert(KEYS[:3], KEYS[:3], 3 - room)
            storage._drawn._insert(KEYS[:3], KEYS[:3], 3, KEYS[:1])
        for value in (weight, *storage.state.values()):
            row_exchange.swap_rows(value, KEYS[:3], torch.zeros_like(value[:3]))
        draws = DrawCounts(rules, 3, 6)
        draws.take_back(draws.add(KEYS[:3], KEYS[1:4]))
        draws.estimate(KEYS)
    with record_launches() as ready:
        call_id_map(rules, config, torch.device("cpu"))
        call_draws(rules, torch.device("cpu"))
        call_row_exchange(config, torch.device("cpu"))
    known = {repr(version) for version in find_versions(ready, H200)}
    assert {repr(version) for version in find_versions(launches, H200)} <= known


# ---- training


def open_device(rules, shards, home):
    with id_map_cases.by_kernels(id_map):
        return DeviceDirectory(rules, *shards, home)


@pytest.fixture
def on_device(monkeypatch):
    """Tables on a CPU as on a GPU; those that were opened."""

    def open_and_note(*given):
        opened.append(open_device(*given))
        return opened[-1]

    opened: list[DeviceDirectory] = []
    monkeypatch.setattr(opening, "open_directory", open_and_note)
    return opened


def train(schedule, rules, folder):
    transport = LocalTransport()
    parallel, pipeline = build(transport, schedule, rules)
    checkpoints = Checkpoints(folder, transport, keep=99, full_every=4)
    losses = []
    for result in pipeline.run([batch_of(ids, n) for n, ids in enumerate(CHURN)]):
        losses.append(result.loss)
        checkpoints.save(parallel, pipeline.optimizer, {"step": result.step})
        with parallel.reading(batch_of(CHURN[0], 99)) as batch:
            parallel(batch)
    checkpoints.wait()
    pipeline.close()
    return losses, state_of(parallel)


def assert_same(actual, expected):
    assert actual[0] == expected[0] and actual[1].keys() == expected[1].keys()
    differ = [n for n, value in expected[1].items() if not torch.equal(actual[1][n], value)]
    assert differ == []


PLAIN = [replace(rules, default="zeros") for rules in (RULES[0], *RULES[2:])]  # no learned row


@pytest.mark.parametrize("rules", PLAIN, ids=str)
def test_training_has_the_bits_of_the_host_map(rules, on_device, tmp_path, monkeypatch):
    """With checkpoints and evaluations after each step, full and differential; and either map reads
    those of the other."""
    found = train(Staged, rules, tmp_path / "device")
    assert len(on_device) == 1
    monkeypatch.undo()
    assert_same(found, train("serial", rules, tmp_path / "host"))
    for step in (3, len(CHURN)):
        states = []
        for name in ("host", "device"):
            with monkeypatch.context() as patch:
                if name == "host":  # reads those of the device
                    patch.setattr(opening, "open_directory", open_device)
                states.append(load(tmp_path / name, step, rules))
        assert_same(([], states[0]), ([], states[1]))


def load(folder, step, rules):
    parallel, _ = build(LocalTransport(), "serial", rules)
    checkpoints = Checkpoints(folder, parallel.transport)
    checkpoints.load(checkpoints.path(step), parallel)
    found = parallel.tables.get_group("item").rows.directory.find(KEYS)
    return state_of(parallel) | {"found": found}


# ---- what a user says


def test_text_and_mistakes():
    assert parse_dynamic("dynamic:1M:lfu:map=device") == Dynamic("1M", evict="lfu", map="device")
    for make, message in (
        (lambda: Dynamic(1, map="gpu"), "'host' or 'device'"),
        (lambda: Dynamic(1, default="learned", map="device"), "take map='host'"),
        (lambda: parse_dynamic("dynamic:1M:map=gpu"), "map=device"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
