"""Dynamic tables on a GPU: decided on by the host beside the compute, with the bits of the serial
schedule and the decisions of a CPU."""

from __future__ import annotations

import pytest
import torch
from helpers.collisions import batch_of
from helpers.dynamic_streams import CHURN, RULES, build
from helpers.gpu_training import CudaClicks

import freescale
from freescale.pipeline.staged import Staged
from freescale.train.checkpoint import Checkpoints
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
    used = (parts["last_use"] >= 0).nonzero().view(-1)
    return {
        name: value.detach().cpu()[used].contiguous().view(torch.uint8)
        for name, value in parts.items()
    }


def assert_same(actual, expected):
    assert actual[0] == expected[0]
    assert [n for n, value in expected[1].items() if not torch.equal(actual[1][n], value)] == []


@pytest.mark.parametrize("model", [CudaClicks32, CudaClicks])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_staged_is_serial_to_the_bit(rules, model, tmp_path):
    expected = train("serial", rules, model)
    for schedule in (Staged, "staged"):  # the last one: single.py, rows made in a lane
        assert_same(train(schedule, rules, model), expected)
        assert_same(train(schedule, rules, model, tmp_path / str(schedule)), expected)


@pytest.mark.parametrize("model", [CudaClicks32, CudaClicks])
def test_checkpoints_beside_training_are_those_of_serial(model, tmp_path):
    train("serial", RULES[2], model, tmp_path / "serial")
    train(Staged, RULES[2], model, tmp_path / "staged")
    for step in range(1, len(CHURN) + 1):
        found = []
        for name in ("serial", "staged"):
            parallel, _ = build(LocalTransport("cuda"), "serial", RULES[2], model=model)
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
        decided.append([parts[name].clone() for name in ("ids", "last_use", "count")])
    assert all(torch.equal(a, b) for a, b in zip(*decided, strict=True))


def test_a_host_table_behind_a_cache():
    expected = train("serial", RULES[1], CudaClicks32, optimizer="adam")
    placement = {"item": freescale.Host(4 * 8 * 3 * 200), "action": "sharded"}
    for schedule in ("serial", Staged, "staged"):
        found = train(schedule, RULES[1], CudaClicks32, optimizer="adam", placement=placement)
        assert_same(found, expected)
