"""The ladder's arms: what the rung `defaults` is made of, and that all rungs train alike."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.ranks import run_ranks

from freescale.config import TrainConfig
from freescale.pipeline.serial import Serial
from freescale.pipeline.staged import Staged

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peer")]

import ladder_arms  # noqa: E402
import rungs  # noqa: E402
from workload import Workload  # noqa: E402

TINY = Workload(
    rows=4000,
    width=8,
    samples=4,
    median_length=12,
    maximum_length=40,
    collisions=0.1,
    layers=1,
    inner=16,
    steps=4,
)


def climb(transport, names):
    found = {}
    for name in names:
        running = ladder_arms.arm(name, TINY, transport.rank, transport.world)
        balancer = running.pipeline.balancer
        found[name] = {
            "losses": [running.step() for _ in range(3)],
            "options": ladder_arms.taken(name, running),
            "schedule": type(running.pipeline.schedule),
            "partitioner": balancer.partitioner.__name__ if balancer else "none",
            "adapts": bool(balancer and balancer.adaptive),
        }
        running.quiet()
    return transport.about, found


def test_the_rung_of_defaults_is_what_training_takes_on_the_same_ranks():
    """`transport` of these ranks is made by `connect`, as training makes it."""
    about, found = run_ranks(2, climb, list(rungs.OURS))[0]
    plain, full = found[rungs.DEFAULTS], found[rungs.FULL]
    chosen = TrainConfig()
    assert (
        plain["schedule"] is {"staged": Staged, "serial": Serial}[chosen.schedule]
        and plain["partitioner"] == chosen.balance
    )
    assert plain["adapts"] == chosen.balance_adapt
    assert plain["options"]["transport"] != "auto" and about.startswith(
        f"transport {plain['options']['transport']} ("
    )
    assert full["adapts"] and full["options"]["transport"] == "hostwire-tcp"
    serial = found[rungs.SERIAL]["losses"]
    for name, one in found.items():
        assert one["losses"] == pytest.approx(serial, rel=1e-5), name
    assert found["staged"]["losses"] == serial


def test_a_rung_has_fields_and_defaults_of_training():
    assert asdict(rungs.OURS[rungs.DEFAULTS]).items() <= asdict(TrainConfig()).items()
