"""The staged schedule against the serial one: tables, row state, dense weights and every loss, bit
for bit.

The stale control (freescale_bench.staged.stale), which ignores collisions, must fail the same
comparison.
"""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.collisions import (
    ITEMS,
    STEPS,
    StagedAsOnGpus,
    batch_of,
    build,
    colliding,
    in_pieces,
    share_of,
    state_of,
    train,
)
from helpers.ranks import gather_ranks, run_ranks
from helpers.wires import WIRES, wired
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.batch import SequenceBatch
from freescale.embedding import collision
from freescale.embedding.collision import is_few
from freescale.embedding.groups.sharded import Sharded
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.ledger.ledger import Ledger
from freescale.pipeline.staged import Staged
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport


def skipping(steps: int = STEPS, size: int = 40) -> list[list[int]]:
    """Batches i-1 and i+1 share rows that batch i does not read; some others are in all."""
    return [
        [(i * 7 + 100 * (step % 2)) % 97 + 200 * (step % 2) for i in range(size)] + [5500, 5501]
        for step in range(steps)
    ]


def few_and_many() -> list[list[int]]:
    """Some batches have so few rows that they are not divided where another such follows. All share
    rows, with the next batch and the one after it."""
    sizes = 40, 2, 3, 2, 40, 3, 40, 40, 2, 3
    return [[(i * 7 + step) % 61 for i in range(size)] for step, size in enumerate(sizes)]


class Wide(nn.Module):
    """Tables of two widths (two groups), one of them read by two modules' features, recomputed
    activations."""

    ids = {"first": ["history"], "second": ["history", "extra"], "action": ["actions"]}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ITEMS, 3, dtype=torch.float64, device="meta")
        self.second = nn.Embedding(ITEMS, 7, dtype=torch.float64, device="meta")
        self.action = nn.Embedding(5, 7, dtype=torch.float64, device="meta")
        self.layer = nn.Linear(10, 2, dtype=torch.float64)

    def forward(self, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        lengths = batch.sequences["history"].lengths
        sample = torch.repeat_interleave(torch.arange(len(batch)), lengths)

        def read(ids: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
            return torch.cat(
                [torch.tanh(self.first(ids)), torch.tanh(self.second(ids) + self.action(actions))],
                dim=1,
            )

        tokens = checkpoint(
            read, batch.values("history"), batch.values("actions"), use_reentrant=False
        )
        pooled = torch.zeros(len(batch), 10, dtype=tokens.dtype).index_add(0, sample, tokens)
        logits = self.layer(pooled) + self.second(batch.dense["extra"]).sum((1, 2))[:, None]
        labels = batch.dense["labels"].to(logits.dtype)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, labels, reduction="none"
        ).sum(0)
        return {"click": losses[0], "like": losses[1]}


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """What a test sends is cut into pieces, too. Ranks are processes of their own: `in_pieces`
    tells them."""
    monkeypatch.setitem(collision._LEAST_BYTES, "cpu", 256)
    monkeypatch.setattr(collision, "_LEAST_MESSAGE", 1)


def differences(transport, stream, schedule="staged", **options):
    """What is not bit-equal to the serial schedule."""
    losses, expected = train(transport, "serial", stream, **options)
    assert len(losses) == len(stream) and losses[0] != losses[-1]
    actual_losses, actual = train(transport, schedule, stream, **options)
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    return different + ["losses"] * (actual_losses != losses)


STREAMS = {f"{share:.0%} collide": colliding(share) for share in (0, 0.12, 0.5, 1)}
STREAMS["some skip a batch"] = skipping()
STREAMS["some have few rows"] = few_and_many()


def _pairs(world):
    """(optimizer, stream): all of them on one rank; on 2, 3 and 4 ranks a third each, so that every
    optimizer and every stream is on every number of ranks."""
    return [
        (optimizer, stream)
        for row, optimizer in enumerate(ROW_OPTIMIZERS)
        for column, stream in enumerate(STREAMS)
        if world == 1 or (row + column) % 3 == world - 2
    ]


def _all_pairs(transport):
    return {
        (optimizer, stream): differences(transport, STREAMS[stream], optimizer=optimizer)
        for optimizer, stream in _pairs(transport.world)
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4], ids=["1 rank", "2 ranks", "3 ranks", "4 ranks"])
def test_bit_equal_to_serial(world):
    """Four row optimizers at a large learning rate; 0, 12, 50 and 100 % collisions; rows that skip
    a batch."""
    pairs = _pairs(world)
    assert {*ROW_OPTIMIZERS, *STREAMS} == {name for pair in pairs for name in pair}
    for found in run_ranks(world, _all_pairs, timeout=240):
        assert found == dict.fromkeys(pairs, [])


OPTIONS = {
    "two groups, recomputation": {"model": Wide, "optimizer": "adam"},
    "accumulation": {"accumulate": 3, "clip": 0.5},
    "mixed placement": {
        "placement": {"item": "sharded", "action": "replicated"},
        "optimizer": "rowwise_adagrad",
    },
    "all replicated": {"placement": "replicated"},
    "learning-rate schedule": {
        "optimizer": "adam",
        "learning_rate": lambda step: 1 / (1 + step % 3),
    },
}


def _variants(transport):
    found = {
        name: differences(transport, colliding(0.3), **options) for name, options in OPTIONS.items()
    }
    ones = [ids[:1] if step % 3 else [] for step, ids in enumerate(colliding(0.5))]
    ones[0] = [7]
    found["one sample or none"] = differences(transport, ones, optimizer="adam")
    balancer = {"balance": Balancer(PARTITIONERS["greedy"], CostModel.balanced_at(5))}
    found["balanced"] = differences(transport, colliding(0.3), optimizer="adam", **balancer)
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_bit_equal_in_every_variant(world):
    for found in run_ranks(world, _variants, timeout=240):
        assert found == dict.fromkeys(found, [])


def _stale(transport):
    return [differences(transport, colliding(share), "stale") for share in (0.12, 0.5)]


@pytest.mark.parametrize("world", [1, 2])
def test_the_stale_control_is_seen(world):
    """Ignoring collisions changes rows, row state, dense weights and losses."""
    for wrong in run_ranks(world, _stale):
        for different in wrong:
            assert {"item/rows", "item/sum", "layers.0.weight", "losses"} <= set(different)


streams = st.lists(st.lists(st.integers(0, 14), max_size=6), min_size=2, max_size=9).filter(
    lambda s: sum(map(bool, s[:1])) == 1
)


@settings(deadline=None, max_examples=30)
@given(streams, st.sampled_from(sorted(ROW_OPTIMIZERS)), st.integers(1, 2))
def test_any_stream_of_ids(stream, optimizer, accumulate):
    different = _differences_of_any(LocalTransport(), stream, optimizer, accumulate)
    assert different == []


def _differences_of_any(transport, stream, optimizer, accumulate):
    options = {"optimizer": optimizer, "accumulate": accumulate}
    losses, expected = train(transport, "serial", stream, **options)
    actual_losses, actual = train(transport, "staged", stream, **options)
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    return different + ["losses"] * (actual_losses != losses)


def _many_streams(transport):
    generator = torch.Generator().manual_seed(1)
    found = []
    for case in range(12):
        stream = [
            torch.randint(0, 14, (int(n),), generator=generator).tolist()
            for n in torch.randint(0, 9, (8,), generator=generator)
        ]
        stream[0] = [1, 2, 3]
        found.append(
            _differences_of_any(transport, stream, list(ROW_OPTIMIZERS)[case % 4], 1 + case % 2)
        )
    return found


def test_small_streams_on_three_ranks():
    """More ranks than samples, empty batches in the middle, every id hot."""
    for found in run_ranks(3, _many_streams):
        assert found == [[]] * 12


def _uneven(transport, schedule):
    parallel, pipeline = build(transport, schedule)
    stream = colliding(0.4, steps=(6, 3, 0)[transport.rank], seed=transport.rank)
    losses = [
        result.loss
        for result in pipeline.run([batch_of(ids, number) for number, ids in enumerate(stream)])
    ]
    return losses, state_of(parallel)


def test_ranks_whose_data_ends_early():
    """One of them never had any."""
    for (losses, expected), (actual_losses, actual) in zip(
        run_ranks(3, _uneven, "serial"), run_ranks(3, _uneven, "staged"), strict=True
    ):
        assert len(losses) == 6 and actual_losses == losses
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


def _interrupted(transport, folder, schedule, stop):
    """Trains, flushes in the middle of the loop and once more, leaves the loop at `stop`, and goes
    on in a new pipeline."""
    stream = colliding(0.4, steps=14)
    batches = [share_of(batch_of(ids, number), transport) for number, ids in enumerate(stream)]
    parallel, pipeline = build(transport, schedule, "adam")
    losses, middle = [], {}
    checkpoints = Checkpoints(Path(folder) / schedule, transport)
    for result in pipeline.run(batches):
        losses.append(result.loss)
        if result.step in (3, 4):
            pipeline.flush()
            middle[result.step] = state_of(parallel)
        if result.step == stop:
            checkpoints.save(
                parallel, pipeline.optimizer, {"step": stop, "pipeline": pipeline.state_dict()}
            )
            break
    parallel, pipeline = build(transport, schedule, "adam")
    progress = checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer)
    pipeline.load_state_dict(progress["pipeline"])
    losses += [result.loss for result in pipeline.run(batches[stop:])]
    return losses, middle, state_of(parallel)


@pytest.mark.parametrize("world", [1, 2])
def test_flush_and_resume_in_the_middle(world, tmp_path):
    losses, expected = run_ranks(world, _train_adam, "serial")[0]
    serial = run_ranks(world, _interrupted, str(tmp_path), "serial", 8)
    staged = run_ranks(world, _interrupted, str(tmp_path), "staged", 8)
    for (_, middle, _), (actual_losses, actual_middle, actual) in zip(serial, staged, strict=True):
        assert actual_losses == losses
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
        for step, state in middle.items():
            assert all(
                torch.equal(actual_middle[step][name], value) for name, value in state.items()
            ), f"after step {step}"


def _train_adam(transport, schedule):
    return train(transport, schedule, colliding(0.4, steps=14), optimizer="adam")


def _unflushed(transport):
    in_pieces()  # of fewer rows nothing is deferred
    parallel, pipeline = build(transport, "staged")
    stream = [
        share_of(batch_of(ids, number), transport)
        for number, ids in enumerate(colliding(0.3, steps=6))
    ]
    for result in pipeline.run(stream):
        if result.step == 4:
            before = state_of(parallel)
            pipeline.flush()
            return not torch.equal(before["item/rows"], state_of(parallel)["item/rows"])


def test_something_is_deferred():
    """Otherwise flush, and the order of a and d, would be tested by nothing."""
    assert run_ranks(2, _unflushed) == [True, True]


def _few(transport, nearby):
    in_pieces()
    transport.machines = [0] * transport.world if nearby else range(transport.world)
    parallel, pipeline = build(transport, "serial")
    batches = [
        share_of(batch_of(ids, number), transport) for number, ids in enumerate(few_and_many())
    ]
    next(pipeline.run(batches))
    requests = [parallel.tables.set.request([batch])[0] for batch in batches]
    return [is_few(request.bytes, transport.device, nearby) for request in requests]


def test_some_have_few_rows():
    """The same ones on every rank, although their shares differ in size."""
    few = [False, True, True, True, False, True, False, False, True, True]
    assert run_ranks(3, _few, True) == [few] * 3


def test_over_hosts_batches_of_few_rows_are_divided_too():
    assert not any(run_ranks(2, _few, False)[0])


def _pieces(transport):
    in_pieces()
    parallel, pipeline = build(transport, "serial")
    batches = [
        share_of(batch_of(ids, number), transport)
        for number, ids in enumerate(colliding(0.3, steps=3))
    ]
    next(pipeline.run(batches))
    return [request.pieces for request in parallel.tables.set.request(batches[1:2])]


def test_something_travels_in_pieces():
    """The same number on every rank, although their shares differ in size."""
    assert run_ranks(3, _pieces) == [[4]] * 3


def _failing(transport, wire):
    if wire != "process group":
        kind, shared = wired(wire)
        options = {"shared": shared, "timeout": timedelta(seconds=30)}
        transport = HostwireTransport(
            "cpu", Ledger(), transport.group, transport.control, kind, **options
        )
    parallel, pipeline = build(transport, "staged")

    def data():
        for number, ids in enumerate(colliding(0.3, steps=8)):
            if number == 5 and transport.rank == 1:
                raise OSError("the disk is gone")
            yield share_of(batch_of(ids, number), transport)

    list(pipeline.run(data()))


@pytest.mark.parametrize("wire", ["process group", "shared memory", "tcp"])
def test_errors_reach_all_ranks(wire):
    """By the lane that takes batches, while another thread sums over the process group."""
    for error, _ in gather_ranks(2, _failing, wire, timeout=60):
        assert error is not None and "the disk is gone" in error


def _broken_lane(transport):
    parallel, pipeline = build(transport, partial(Staged, masks=_crash))
    batches = [
        share_of(batch_of(ids, number), transport)
        for number, ids in enumerate(colliding(0.3, steps=4))
    ]
    list(pipeline.run(batches))


def _crash(current, following):
    raise RuntimeError("no masks today")


def test_no_step_waits_for_the_request_of_the_batch_after_next(monkeypatch):
    """Lane `input` asks for its rows once the step is over."""
    _, pipeline = build(LocalTransport(), StagedAsOnGpus)
    over, choose = threading.Semaphore(0), pipeline.schedule._choose_request

    def choose_late():
        request = choose()

        def request_late(micro):
            assert over.acquire(timeout=20), "the step waits for it"
            return request(micro)

        return request_late if request is not None else None

    monkeypatch.setattr(pipeline.schedule, "_choose_request", choose_late)
    steps = 0
    for _ in pipeline.run([batch_of(ids, n) for n, ids in enumerate(colliding(0.4))]):
        over.release()
        steps += 1
    assert steps == STEPS


def test_an_error_of_a_request_is_raised_by_the_step_that_needs_it(monkeypatch):
    _, pipeline = build(LocalTransport(), StagedAsOnGpus)

    def crash(micro):
        raise RuntimeError("no ids today")

    monkeypatch.setattr(pipeline.schedule, "_choose_request", lambda: crash)
    steps = pipeline.run([batch_of(ids, n) for n, ids in enumerate(colliding(0.4, steps=4))])
    with pytest.raises(RuntimeError, match="no ids today"):
        list(steps)
    assert not any(lane._thread for lane in pipeline.schedule.lanes)


def test_errors_of_a_lane_are_raised_by_the_step():
    for error, _ in gather_ranks(2, _broken_lane, timeout=60):
        assert error is not None and "no masks today" in error


def test_an_error_between_the_moments_reaches_the_other_lane(monkeypatch):
    """After stage 2 and before there is memory for the rows: stage 5 has begun, 6 must not wait for
    ever."""

    def crash(*_):
        raise RuntimeError("no memory today")

    parallel, pipeline = build(LocalTransport(), Staged)
    jobs, submit = [], pipeline.schedule.urgent.submit
    monkeypatch.setattr(
        pipeline.schedule.urgent, "submit", lambda *job: jobs.append(submit(*job)) or jobs[-1]
    )
    monkeypatch.setattr(Sharded, "allocate_rows", crash)
    batches = [batch_of(ids, number) for number, ids in enumerate(colliding(0.3, steps=4))]
    with pytest.raises(RuntimeError, match="no memory today"):
        list(pipeline.run(batches))
    [urgent] = jobs
    assert urgent._reached.wait(timeout=30)
    with pytest.raises(RuntimeError, match="no memory today"):
        urgent.wait()


def _over(transport, wire, seed):
    """Staged against serial over one transport, and both against serial over process groups; ranks
    held up at random."""
    kind, shared = wired(wire)
    draw = random.Random(100 * seed + transport.rank)
    stream = colliding(0.3, seed=seed)
    expected = train(transport, "serial", stream, optimizer="adam")
    found = []
    for schedule in ("serial", "staged"):
        options = {"shared": shared, "timeout": timedelta(seconds=60)}
        over = HostwireTransport(
            "cpu", Ledger(), transport.group, transport.control, kind, **options
        )
        losses, state = train(over, schedule, stream, optimizer="adam", held_up=draw)
        found.append(
            losses == expected[0]
            and all(torch.equal(state[name], value) for name, value in expected[1].items())
        )
        over.close()
    return found


@pytest.mark.parametrize(
    ("world", "wire"),
    [
        *((2, wire) for wire in WIRES),
        *((3, wire) for wire in WIRES[1:]),
        (4, WIRES[0]),
        (4, WIRES[1]),
    ],
)
def test_bit_equal_over_every_wire(world, wire):
    for found in run_ranks(world, _over, wire, world, timeout=240):
        assert found == [True, True]


def _rounded(transport):
    """Rows and gradients in bf16 on the way: the schedules still agree to the bit, and less is
    sent."""
    stream = colliding(0.3)
    losses, bits_of = {}, {}
    for schedule in ("serial", "staged"):
        for wire in (None, torch.bfloat16):
            losses[schedule, wire], bits_of[schedule, wire] = train(
                transport, schedule, stream, wire=wire
            )
    for wire in (None, torch.bfloat16):
        assert losses["serial", wire] == losses["staged", wire]
        assert all(
            torch.equal(bits_of["staged", wire][name], value)
            for name, value in bits_of["serial", wire].items()
        )
    return (
        losses["serial", None][0],
        losses["serial", torch.bfloat16][0],
        losses["serial", None] != losses["serial", torch.bfloat16],
    )


@pytest.mark.parametrize("world", [1, 2])
def test_bit_equal_with_rounded_rows(world):
    for full, rounded, differs in run_ranks(world, _rounded):
        assert differs and abs(rounded - full) / full < 2**-8


def _bytes(transport):
    sent = {}
    for wire in (None, torch.bfloat16):
        _, pipeline = build(transport, "serial", wire=wire)
        list(
            pipeline.run(
                [
                    share_of(batch_of(ids, number), transport)
                    for number, ids in enumerate(colliding(0.3, steps=4))
                ]
            )
        )
        kinds = [entry for record in pipeline.ledger.drain() for entry in record["collectives"]]
        sent[wire] = [
            sum(entry[1] for entry in kinds if entry[0] == kind)
            for kind in ("rows", "gradients", "ids")
        ]
    return sent


def test_rounded_rows_are_a_quarter_of_float64():
    for sent in run_ranks(2, _bytes):
        (rows, gradients, ids), (less_rows, less_gradients, same_ids) = (
            sent[None],
            sent[torch.bfloat16],
        )
        assert rows == 4 * less_rows > 0 and gradients == 4 * less_gradients > 0 and ids == same_ids
