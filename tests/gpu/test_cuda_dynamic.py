"""Dynamic tables on a GPU, decided on by the host or by the device beside the compute, with the
bits of the serial schedule and the decisions of a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import dynamic_storage_cases, id_map_cases
from helpers.collisions import batch_of
from helpers.dynamic_oracle import FineDynamic
from helpers.dynamic_streams import CHURN, RULES, build
from helpers.gpu_training import CudaClicks

import freescale
from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.draws import DrawCounts
from freescale.embedding.dynamic_rules import SHARDS, After, Dynamic
from freescale.embedding.layout import compute_keys
from freescale.pipeline.staged import Staged
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def deterministic():
    """What a model adds up by itself, too: without it two serial runs differ in their last bits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class CudaClicks32(CudaClicks):
    """In the type of Triton's kernels."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)


def train(schedule, rules, model, folder=None, **options):
    """(losses, ids and what their rows hold); with a folder, checkpoints and evaluations between
    steps."""
    transport = LocalTransport("cuda")
    parallel, pipeline = build(transport, schedule, rules, model=model, precision="fp32", **options)
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(folder, transport, keep=99, full_every=4, asynchronous=True)
    losses = []
    for result in pipeline.run([batch_of(ids, number) for number, ids in enumerate(CHURN)]):
        losses.append(float(result.loss))
        if checkpoints is not None:
            checkpoints.save(parallel, pipeline.optimizer, {"step": result.step})
            if result.step % 2:
                with parallel.reading(batch_of(CHURN[0], 99)) as batch:
                    parallel(batch)
    if checkpoints is not None:
        checkpoints.wait()
    pipeline.close()
    return losses, read_rows(parallel)


def read_rows(parallel):
    parts = parallel.tables.get_group("item").rows.get_tensors("item")
    used = (parts["last_use"].cpu() >= 0).nonzero().view(-1)
    return {
        name: value.detach().cpu()[used].contiguous().view(torch.uint8)
        for name, value in parts.items()
    }


def assert_same(actual, expected):
    assert actual[0] == expected[0]
    assert [n for n, value in expected[1].items() if not torch.equal(actual[1][n], value)] == []


ON_HOST = [replace(rules, map="host") for rules in RULES]
ON_DEVICE = [replace(rules, map="device", default="zeros") for rules in RULES]


@pytest.mark.parametrize("model", [CudaClicks32, CudaClicks])
@pytest.mark.parametrize("rules", [*ON_HOST, *ON_DEVICE], ids=str)
def test_staged_is_serial_to_the_bit(rules, model, tmp_path):
    expected = train("serial", rules, model)
    for schedule in (Staged, "staged"):  # the last one: single.py, rows made in a lane
        assert_same(train(schedule, rules, model), expected)
        assert_same(train(schedule, rules, model, tmp_path / str(schedule)), expected)


@pytest.mark.parametrize("model", [CudaClicks32, CudaClicks])
def test_checkpoints_beside_training_are_those_of_serial(model, tmp_path):
    train("serial", ON_HOST[2], model, tmp_path / "serial")
    train(Staged, ON_HOST[2], model, tmp_path / "staged")
    for step in range(1, len(CHURN) + 1):
        found = []
        for name in ("serial", "staged"):
            parallel, _ = build(LocalTransport("cuda"), "serial", ON_HOST[2], model=model)
            checkpoints = Checkpoints(tmp_path / name, parallel.transport)
            checkpoints.load(checkpoints.path(step), parallel)
            found.append(([], read_rows(parallel)))
        assert_same(*found)


def test_a_cpu_decides_the_same():
    decided = []
    for device in ("cpu", "cuda"):
        model = CudaClicks if device == "cuda" else None
        options = {"model": model} if model is not None else {}
        parallel, pipeline = build(LocalTransport(device), "serial", RULES[1], **options)
        list(pipeline.run([batch_of(ids, number) for number, ids in enumerate(CHURN)]))
        parts = parallel.tables.get_group("item").rows.get_tensors("item")
        decided.append([parts[name].to("cpu", copy=True) for name in ("ids", "last_use", "count")])
    assert all(torch.equal(a, b) for a, b in zip(*decided, strict=True))


# ---- the map on the device


@pytest.mark.parametrize("rules", ON_DEVICE, ids=str)
def test_the_device_decides_as_the_host(rules):
    """Ids, last uses, counts and rows of a training run."""
    decided = []
    for each in (rules, replace(rules, map="host")):
        parallel, pipeline = build(LocalTransport("cuda"), Staged, each, model=CudaClicks32)
        list(pipeline.run([batch_of(ids, number) for number, ids in enumerate(CHURN)]))
        pipeline.close()
        storage = parallel.tables.get_group("item").rows
        assert isinstance(storage.directory, DeviceDirectory) == (each.map == "device")
        decided.append({name: v.cpu() for name, v in storage.get_tensors("item").items()})
    device, host = decided
    for name in ("ids", "last_use", "count"):
        assert torch.equal(device[name], host[name]), name
    used = host["last_use"] >= 0
    assert torch.equal(device["rows"][used], host["rows"][used])


@pytest.mark.parametrize("case", id_map_cases.CASES)
def test_the_cases_of_the_interpreter(case):
    found = id_map_cases.CASES[case]("cuda")
    assert all(
        value is True or name in ("inserted", "evicted", "swept", "turned_away")
        for name, value in found.items()
    ), found


@pytest.mark.parametrize("case", dynamic_storage_cases.CASES)
def test_rows_are_those_of_the_host_map(case):
    found = dynamic_storage_cases.compare(*dynamic_storage_cases.CASES[case], "cuda")
    assert found["steps"] and found["ahead"] and found["evicted"] > 3, found


@pytest.mark.parametrize("evict", ["lru", "lfu", After(5)], ids=str)
def test_a_large_map_decides_as_the_host(evict):
    """All shards, programs beside each other: batches of 200,000 ids, a tenth of which are new,
    each twice and some negatives, through a table of a million rows."""
    pair = id_map_cases.Pair(Dynamic(1_000_000, evict=evict), (0, SHARDS), "cuda")
    generator = torch.Generator().manual_seed(0)
    new, before = 0, None
    for number in range(24):
        size = 200_000 if number > 6 else 400_000
        ids = torch.randint(max(0, new - 1_200_000), new + size // 10, (size,), generator=generator)
        new += size // 2 if number <= 6 else size // 10
        keys = compute_keys(torch.cat([ids, ids]))[torch.randperm(2 * size, generator=generator)]
        counted = (keys % 3 != 0).to(torch.uint8) if number % 4 == 3 else None
        decided, same = pair.decide(keys, counted)
        assert same, number
        assert pair.same_answers(keys.unique()), number
        if number % 5 == 4:
            assert pair.undo(decided) and pair.undo(before), number
            assert pair.same_answers(keys.unique()), number
            assert pair.redo(before) and pair.redo(decided), number
        before = decided
    if not isinstance(evict, After):
        assert decided[0].figures.evicted > 1000


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_large_shard_decides_as_the_host(evict):
    """Few shards of many rows, all of which one batch has filled: bounds among equal last uses."""
    rules = Dynamic(12_000 * SHARDS, evict=evict)
    pair = id_map_cases.Pair(rules, (0, 3), "cuda")
    keys = compute_keys(torch.arange(60_000_000, 120_000_000))
    keys = keys[(keys >> 52) + SHARDS // 2 < 3]
    for number, part in enumerate((keys[:36_000], *[keys[:10]] * 3, *keys[36_000:].split(700))):
        assert pair.decide(part)[1], number
    assert pair.same_answers(keys)


@pytest.mark.parametrize("rows", [1000, 20_000, 100_000])
def test_a_small_map_decides_as_the_host_and_holds_nine_tenths(rows):
    rules, generator = Dynamic(rows), torch.Generator().manual_seed(0)
    pair = id_map_cases.Pair(rules, (0, rules.shards), "cuda")
    keys = compute_keys(torch.arange(2 * rows) * 3)
    for part in keys[:rows].chunk(7):
        assert pair.decide(part)[1]
    assert pair.device.used >= 0.9 * rows
    for number in range(9):  # old ones and new ones
        chosen = torch.randint(number * rows // 9, rows + (number + 1) * rows // 9, (rows // 3,),
                               generator=generator)  # fmt: skip
        decided, same = pair.decide(keys[chosen])
        assert same and pair.undo(decided) and pair.redo(decided) and pair.same_answers(keys)


def test_draws_are_counted_as_by_a_cpu():
    """Sums to the bit, logarithms up to the last one; taken back, too."""
    generator, rules = torch.Generator().manual_seed(0), FineDynamic(100 * SHARDS)
    counts = [DrawCounts(rules, 7, 27, torch.device(device)) for device in ("cpu", "cuda")]
    keys = compute_keys(torch.arange(400_000))
    keys = keys[((keys >> 52) + SHARDS // 2 >= 7) & ((keys >> 52) + SHARDS // 2 < 27)]
    for number in range(4):
        chosen = keys[torch.randint(keys.numel(), (1000,), generator=generator)]
        worth = torch.randint(0, 1 << 20, (1000,), generator=generator)
        draws = [
            each.add(chosen.to(each.sums.device), worth.to(each.sums.device)) for each in counts
        ]
        if number == 2:
            for each, of in zip(counts, draws, strict=True):
                each.take_back(of)
        assert torch.equal(counts[0].sums, counts[1].sums.cpu())
    expected, found = (each.estimate(keys.to(each.sums.device)).cpu() for each in counts)
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


def test_a_host_table_behind_a_cache():
    expected = train("serial", RULES[1], CudaClicks32, optimizer="adam")
    placement = {"item": freescale.Host(4 * 8 * 3 * 200), "action": "sharded"}
    for schedule in ("serial", Staged, "staged"):
        found = train(schedule, RULES[1], CudaClicks32, optimizer="adam", placement=placement)
        assert_same(found, expected)
