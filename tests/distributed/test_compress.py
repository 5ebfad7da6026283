"""Thresholded gradients and activations on several ranks, against plain simulations in one
process."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.toys import Clicks, clicks_batch, rank_slice
from helpers.training import snapshot
from helpers.wires import WIRES, wired
from torch import nn

import freescale
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.data.synthetic.generate import generate
from freescale.ledger.ledger import Ledger
from freescale.pipeline.dense.thresholded import ThresholdedGradients, Thresholding
from freescale.train.progress import describe_run
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.trainer import Trainer
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport

ETA, EVERY, STEPS = 0.9, 3, 8
SHAPES = ((40, 50), (30,), (64, 64))
# That a step sends of each tensor: a share of all 6,126, less the 30 that go whole where that is at
# most a tenth of it.
MOST = {0.9: (191, 30, 390), 0.99: (20, 30, 39), 0.0: (2000, 30, 4096)}
WHOLE = {1}


def gradient(step: int, rank: int, place: int, dtype: str) -> np.ndarray:
    """Rank 1 has no sample in the first step."""
    drawn = np.random.default_rng((step, rank, place)).normal(size=SHAPES[place])
    return (drawn * (step > 0 or rank != 1)).astype(dtype)


def simulated(
    world: int, eta: float, every: int, dtype: str
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """The definition, tensor by tensor with all ranks in a row: applied gradients of each step, and
    errors of each rank."""
    errors = [[np.zeros(shape, dtype) for shape in SHAPES] for _ in range(world)]
    thresholds, ages = np.zeros((world, len(SHAPES)), dtype), np.full((world, len(SHAPES)), every)
    applied = []
    for step in range(STEPS):
        applied.append([np.zeros(shape, dtype) for shape in SHAPES])
        for place in range(len(SHAPES)):
            for rank in range(world):
                whole = gradient(step, rank, place, dtype)
                if place in WHOLE:
                    applied[step][place] += whole
                    continue
                whole = whole + errors[rank][place]
                sent = MOST[eta][place]
                if ages[rank, place] >= every:
                    ordered = np.sort(np.abs(whole).reshape(-1))
                    thresholds[rank, place] = ordered[-sent] if sent < whole.size else 0
                    ages[rank, place] = 0 if thresholds[rank, place] > 0 else every
                ages[rank, place] += 1
                large = (np.abs(whole) >= thresholds[rank, place]) & (whole != 0)
                if large.sum() > sent:
                    large = np.abs(whole) >= np.sort(np.abs(whole[large]))[-sent]
                errors[rank][place] = np.where(large, 0, whole).astype(dtype)
                applied[step][place] += np.where(large, whole, 0).astype(dtype)
    return applied, errors


def against_the_simulation(transport, eta, dtype):
    applied, errors = simulated(transport.world, eta, EVERY, dtype)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for shape in SHAPES]
    gradients = ThresholdedGradients(parameters, torch.device("cpu"), eta, EVERY)
    for step in range(STEPS):
        gradients.clear()
        for place, parameter in enumerate(parameters):
            parameter.grad.copy_(torch.from_numpy(gradient(step, transport.rank, place, dtype)))
        gradients.start(transport, torch.tensor([1.0, transport.rank]))
        gradients.send()
        losses = gradients.reduce()
        assert losses.tolist() == [transport.world, sum(range(transport.world))]
        for place, parameter in enumerate(parameters):
            expected = torch.from_numpy(applied[step][place])
            if place in WHOLE:
                torch.testing.assert_close(parameter.grad, expected)
            else:
                assert torch.equal(parameter.grad, expected), f"step {step}, tensor {place}"
    for place, parameter in enumerate(parameters):
        if place not in WHOLE:
            assert torch.equal(
                gradients.state[parameter]["error"], torch.from_numpy(errors[transport.rank][place])
            )


class Wide(Clicks):
    """Two tensors large enough to be thresholded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 160, dtype=torch.float64),
            nn.Tanh(),
            nn.Linear(160, 16, dtype=torch.float64),
            nn.Tanh(),
            nn.Linear(16, 2, dtype=torch.float64),
        )


def build(transport, reducer, schedule="staged", clip=0.5):
    torch.manual_seed(3)
    rows = freescale.Adagrad(lr=0.1)
    parallel = freescale.parallelize(
        Wide(), Wide.ids, rows, transport=transport, placement="sharded", init_std=0.3, seed=5
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    return parallel, freescale.Pipeline(
        parallel, dense, schedule=schedule, clip=clip, accumulate=2, reducer=reducer
    )


def batches(transport, first, last):
    return [
        rank_slice(clicks_batch(9, seed), transport.rank, transport.world)
        for seed in range(first, last)
    ]


def train(transport, reducer, steps, schedule="staged"):
    parallel, pipeline = build(transport, reducer, schedule)
    losses = [result.loss for result in pipeline.run(batches(transport, 0, steps))]
    pipeline.flush()
    return losses, snapshot(parallel), pipeline


def in_a_pipeline(transport):
    """Holding nothing back is the exact step but for rounding; the schedules agree to the bit;
    weights never diverge."""
    _, exact, _ = train(transport, None, 1)
    _, same, _ = train(transport, Thresholding(0.0), 1)
    for name, value in exact.items():
        torch.testing.assert_close(same[name], value, rtol=1e-10, atol=1e-12)
    staged, state, _ = train(transport, Thresholding(ETA, EVERY), STEPS)
    transport.ledger.drain()
    serial, expected, pipeline = train(transport, Thresholding(ETA, EVERY), STEPS, "serial")
    counted(pipeline, transport.world)
    assert staged == serial
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert not torch.equal(
        train(transport, None, STEPS)[1]["layers.0.weight"], expected["layers.0.weight"]
    )
    return expected


def counted(pipeline, world):
    """Entries, and bytes with their indices: 12 an entry of float64."""
    records = pipeline.ledger.drain()
    shares = []
    for record in records:
        counters = record["counters"]
        assert counters["dense_entries"] == 8 * 160 + 160 * 16
        sent, wire = counters["dense_entries_sent"], counters["dense_entries_on_wire"]
        shares.append(sent / counters["dense_entries"])
        messages = [entry for entry in record["collectives"] if entry[0] == "dense"]
        sizes, out, size, back, small, losses = (entry[1] for entry in messages)
        assert sizes == size == 8 * (world - 1)
        assert out + back == 12 * wire
        assert small == 2 * 8 * (160 + 16 + 32 + 2) * (world - 1) // world and losses > 0
        assert 0 < counters["dense_entries_returned"] <= counters["dense_entries"]
    assert max(shares) <= 0.1 and min(shares[1:]) > 0.01


def saved(transport, folder, steps):
    parallel, pipeline = build(transport, Thresholding(ETA, EVERY))
    for result in pipeline.run(batches(transport, 0, steps + 2)):
        if result.step == steps:
            break
    checkpoints = Checkpoints(Path(folder), transport)
    checkpoints.save(
        parallel,
        pipeline.optimizer,
        {"step": steps, "pipeline": pipeline.state_dict()},
        pipeline.reducer,
    )
    return errors_of(pipeline)


def loaded(transport, folder, reducer=None):
    parallel, pipeline = build(transport, reducer or Thresholding(ETA, EVERY))
    checkpoints = Checkpoints(Path(folder), transport)
    progress = checkpoints.load(
        checkpoints.latest(), parallel, pipeline.optimizer, pipeline.reducer
    )
    pipeline.load_state_dict(progress["pipeline"])
    return parallel, pipeline


def errors_of(pipeline):
    return [entries["error"].clone() for entries in pipeline.reducer.state.values()]


def resumed_in_the_middle(transport, folder, expected, stop=5):
    """Between two resets of the thresholds: to the bit."""
    errors = saved(transport, folder, stop)
    parallel, pipeline = loaded(transport, folder)
    assert all(
        torch.equal(a, b) and a.count_nonzero()
        for a, b in zip(errors_of(pipeline), errors, strict=True)
    )
    list(pipeline.run(batches(transport, stop, STEPS)))
    pipeline.flush()
    actual = snapshot(parallel)
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []
    return errors


def exchanged(transport):
    """Activations of a lower part to the next rank, against autograd of the mask in one process;
    uneven rows, one rank has none."""
    rank, world = transport.rank, transport.world
    rows = [0 if place == 1 else 2 + place for place in range(world)]
    whole = torch.randn(
        sum(rows), 300, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    weight = torch.randn(
        world, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(8)
    )
    begin, before = sum(rows[:rank]), (rank - 1) % world
    for keep in (15, 300):
        x = whole[begin : begin + rows[rank]].clone().requires_grad_(bool(rows[rank]))
        send = [rows[rank] if place == (rank + 1) % world else 0 for place in range(world)]
        transport.ledger.begin_step(0)
        out = freescale.ThresholdedExchange(transport, keep)(x, send)
        (out.square() * weight[rank]).sum().backward()
        transport.ledger.end_step()
        first = sum(rows[:before])
        sent = whole[first : first + rows[before]]
        assert torch.equal(out, sent * largest(sent, keep))
        if rows[rank]:
            mine = whole[begin : begin + rows[rank]]
            torch.testing.assert_close(
                x.grad, 2 * mine * weight[(rank + 1) % world] * largest(mine, keep)
            )
        (record,) = transport.ledger.drain()
        _, forward, backward = (entry[1] for entry in record["collectives"])
        entry = 8 if keep == 300 else 10  # positions in 2 bytes, once
        assert forward == rows[rank] * keep * entry and backward == rows[before] * keep * 8
        assert record["counters"] == {
            "activation_entries": rows[rank] * 300,
            "activation_entries_sent": rows[rank] * keep,
        }


def largest(rows, keep):
    return torch.zeros_like(rows).scatter_(1, rows.abs().topk(keep, 1).indices, 1.0)


def over_a_wire(transport):
    """Messages of bytes, and of single entries, over hostwire too."""
    kind, shared = wired(WIRES[0])
    over = HostwireTransport(
        "cpu",
        Ledger(),
        transport.group,
        transport.control,
        kind,
        shared=shared,
        timeout=timedelta(seconds=60),
    )
    against_the_simulation(over, ETA, "float64")
    over.close()


def everything(transport, folder, other):
    for eta, dtype in ((ETA, "float64"), (0.99, "float32"), (0.0, "float64")):
        against_the_simulation(transport, eta, dtype)
    exchanged(transport)
    over_a_wire(transport)
    state = in_a_pipeline(transport)
    adopted = None
    if other is not None:  # what another number of ranks saved
        _, pipeline = loaded(transport, other)
        adopted = errors_of(pipeline)
        assert len(list(pipeline.run(batches(transport, 5, 7)))) == 2
    return state, resumed_in_the_middle(transport, folder, state), adopted


def test_on_several_ranks(tmp_path):
    """Simulation, schedules, bytes, resuming; and from 4 to 3, 3 to 2 and 2 to 1 ranks with all
    that was held back."""
    before = None
    for world in (4, 3, 2):
        folder, other = tmp_path / str(world), tmp_path / str(world + 1)
        results = run_ranks(world, everything, str(folder), str(other) if before else None)
        for state, _, _ in results[1:]:
            assert all(
                torch.equal(state[name], value)
                for name, value in results[0][0].items()
                if "layers" in name
            )
        if before:
            assert_same_total([adopted for _, _, adopted in results], before)
        before = [errors for _, errors, _ in results]
    _, pipeline = loaded(LocalTransport(), tmp_path / "2")
    assert_same_total([errors_of(pipeline)], before)


def assert_same_total(now, before):
    for place in range(len(before[0])):
        total = sum(errors[place] for errors in before)
        torch.testing.assert_close(
            sum(errors[place] for errors in now), total, rtol=1e-12, atol=1e-15
        )
        assert total.count_nonzero() > 0.5 * total.numel()


def test_exact_and_compressed_checkpoints_load_into_each_other(tmp_path):
    saved(LocalTransport(), tmp_path / "compressed", 3)
    parallel, pipeline = build(LocalTransport(), None)
    checkpoints = Checkpoints(tmp_path / "compressed", LocalTransport())
    checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer, pipeline.reducer)
    exact = Checkpoints(tmp_path / "exact", LocalTransport())
    path = exact.save(
        parallel, pipeline.optimizer, {"step": 3, "pipeline": {"steps": 3}}, pipeline.reducer
    )
    assert "carried" not in json.loads((path / "state.json").read_text())
    _, pipeline = loaded(LocalTransport(), tmp_path / "exact")
    assert not any(error.count_nonzero() for error in errors_of(pipeline))


def test_a_run_is_compressed_and_resumes(tmp_path):
    """Through the configuration, as `freescale train --compress-dense 0.9 --compress-every 3` does
    it."""
    data = generate(
        tmp_path / "data.parquet", users=120, items=60, median=12.0, cap=30, seed=1
    ).path

    def run(folder, steps, resume=False, **options):
        settings = TrainConfig(global_batch=16, steps=steps, trace_steps=0, **options)
        sizes = DataConfig(data=str(data), max_length=20, negatives=8)
        config = RunConfig(sizes, ModelConfig(width=32, layers=1, heads=1), settings)
        trainer = Trainer(
            config, tmp_path / folder, resume=resume, histories=data, transport=LocalTransport()
        )
        return trainer.train(), trainer.model.module.state_dict(), describe_run(trainer)

    compressed = {"compress_dense": ETA, "compress_every": EVERY}
    results, whole, lines = run("whole", 8, **compressed)
    run("cut", 4, **compressed)
    _, again, _ = run("cut", 8, resume=True, **compressed)
    _, exact, _ = run("exact", 8)
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    assert not torch.equal(
        exact["encoder.layers.0.projection.weight"], whole["encoder.layers.0.projection.weight"]
    )
    assert 5 < results["ledger"]["dense_sent_percent"] <= 10.1
    assert any("the largest 10.00% of their gradients in a step" in line for line in lines)


def test_a_lost_error_is_seen(monkeypatch, tmp_path):
    """The comparisons above would pass if errors were never carried and never saved: here they are
    not, and it shows."""
    monkeypatch.setattr(ThresholdedGradients, "adopt", lambda self, saved, same_ranks: None)
    expected = train(LocalTransport(), Thresholding(ETA, EVERY), STEPS)[1]
    with pytest.raises(AssertionError):
        resumed_in_the_middle(LocalTransport(), str(tmp_path), expected)
