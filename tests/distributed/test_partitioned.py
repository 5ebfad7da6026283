"""Partitioned sums: every rank gets the sum in rank order, bit for bit, over every transport;
schedules agree on it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from helpers.collisions import build, colliding, train
from helpers.ranks import run_ranks
from helpers.wires import wired

from freescale.ledger.ledger import Ledger
from freescale.ledger.merge import merge_step
from freescale.pipeline.dense import buckets
from freescale.pipeline.dense.partitioned import PartitionedAllReduce, partition
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport

WIRES = ["process group", "shared memory", "ucx: tcp"]
SIZES = (0, 1, 3, 17, 10_007, 300_000)


def test_parts_cover_everything_once():
    for count in (0, 1, 3, 4, 5, 10_007):
        for world in (1, 2, 3, 4, 7):
            sizes = partition(count, world)
            assert len(sizes) == world and sum(sizes) == count and max(sizes) == -(-count // world)


def _over(transport, wire):
    if wire == "process group":
        return transport
    kind, shared = wired(wire)
    return HostwireTransport(
        "cpu",
        Ledger(),
        transport.group,
        transport.control,
        kind,
        shared=shared,
        timeout=timedelta(seconds=60),
    )


def _sums(transport, wire):
    over = _over(transport, wire)
    by_lane, by_itself = (_sum(over, PartitionedAllReduce(over, lane)) for lane in (True, False))
    assert by_lane == by_itself
    if over is not transport:
        over.close()
    return by_lane


def _sum(transport, summing):
    """(sizes of wrong sums, path and bytes of the last)."""
    generator = torch.Generator().manual_seed(0)
    wrong, under_way = [], []
    for size in SIZES:
        everyone = [
            torch.randn(size, generator=generator) * 10**rank for rank in range(transport.world)
        ]
        expected = everyone[0].clone()
        for part in everyone[1:]:
            expected += part
        under_way.append((summing.all_reduce(everyone[transport.rank].clone(), "dense"), expected))
    for handle, expected in under_way:
        if not torch.equal(handle.wait(), expected):
            wrong.append(expected.numel())
    summing.close()
    return wrong, handle.path, handle.bytes


@pytest.mark.parametrize(
    ("world", "wire"),
    [(2, WIRES[0]), (2, WIRES[1]), (3, WIRES[0]), (3, WIRES[1]), (4, WIRES[1]), (2, WIRES[2])],
)
def test_sums_in_rank_order(world, wire):
    for wrong, path, size in run_ranks(world, _sums, wire):
        assert not wrong and size == 2 * 4 * SIZES[-1] * (world - 1) // world
        assert ("hostwire" in path) == (wire != "process group")


def _schedules(transport, wire, sums):
    buckets._LEAST_BYTES["cpu"] = 256
    assert len(build(transport, "serial")[1].schedule.buckets.flat) > 1
    found = []
    for schedule in ("serial", "staged"):
        over = _over(transport, wire)
        found.append(
            train(over, schedule, colliding(0.3, steps=12), dense_sums=sums, accumulate=2, clip=0.5)
        )
        if over is not transport:
            over.close()
    (losses, state), (other_losses, other) = found
    return losses == other_losses and all(
        torch.equal(other[name], value) for name, value in state.items()
    ), losses[-1]


@pytest.mark.parametrize("wire", WIRES[:2])
def test_schedules_agree_and_learn_the_same(wire):
    by_parts, by_group = (
        run_ranks(3, _schedules, wire, sums) for sums in ("partitioned", "collective")
    )
    for (equal, loss), (equal_too, other) in zip(by_parts, by_group, strict=True):
        assert equal and equal_too and loss == pytest.approx(other, rel=1e-9)


def _ledger(transport):
    over = _over(transport, "shared memory")
    train(over, "staged", colliding(0.3, steps=6), dense_sums="partitioned")
    steps = over.ledger.drain()
    over.close()
    return steps


def test_the_ledger_has_the_bytes_and_the_path():
    for step in zip(*run_ranks(2, _ledger), strict=True):
        figures = merge_step(step)
        assert figures["bytes"]["dense"] > 0 and list(figures["paths"]["dense"]) == [
            "hostwire: shared memory"
        ]


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="dense_sums must be one of"):
        build(LocalTransport(), "serial", dense_sums="ring")
