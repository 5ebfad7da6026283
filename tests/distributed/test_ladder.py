"""The ladder's arms: what the rung `defaults` is made of, and that all rungs train alike."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from freescale_bench.common.workload import Workload
from freescale_bench.ladder import arms as ladder_arms
from freescale_bench.ladder import product, rungs
from freescale_bench.ladder.rungs import add_link_time, describe_link
from helpers.ranks import run_ranks

from freescale.config import TrainConfig
from freescale.pipeline.serial import Serial
from freescale.pipeline.staged import Staged
from freescale.transport.connect import connect

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
        running = ladder_arms.build_arm(name, TINY, transport.rank, transport.world)
        balancer = running.pipeline.balancer
        found[name] = {
            "losses": [running.step() for _ in range(3)],
            "options": ladder_arms.find_options(name, running),
            "schedule": type(running.pipeline.schedule),
            "partitioner": balancer.partitioner.__name__ if balancer else "none",
            "adapts": bool(balancer and balancer.adaptive),
        }
        running.quiet()
    return connect("cpu", 60, "auto").about, found


def test_the_rung_of_defaults_is_what_training_takes_on_the_same_ranks():
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


def measure_product(transport, file):
    return product.run_arms(transport.rank, transport.world, "trial", "cpu", 1, 2, file)


def test_the_product_is_a_trainer_with_defaults(tmp_path):
    """On the ladder of `freescale train` itself, to its rows; TorchRec is not installed here."""
    file = str(product.write_histories("trial", str(tmp_path)))
    everyone = run_ranks(2, measure_product, file)
    taken = everyone[0]["options"][rungs.PRODUCT]
    chosen = TrainConfig()
    for name in ("schedule", "balance", "balance_adapt"):
        assert taken[name] == getattr(chosen, name)
    assert "auto" not in taken.values() and taken["precision"] == "fp32"
    rows, claims, workload = product.summarize(everyone, "trial", on_gpu=False)
    by = {row["arm"]: row for row in rows}
    assert list(by) == [rungs.SERIAL, rungs.UNBALANCED, rungs.PRODUCT]
    assert by[rungs.PRODUCT]["largest_relative_loss_difference_to_serial"] < 1e-5
    assert all(entry["holds"] for entry in claims) and workload["samples"] == 4
    said = rungs.explain_rungs({"rows": rows, "machine": {"gpu": ""}}, "`")
    assert "`--schedule staged --balance greedy" in said and "--precision fp32`" in said


def test_the_link_bounds_a_step_by_the_bytes_of_a_rank():
    """25 kB a millisecond at 200 Mbit/s, and two ranks send at once."""
    median = {"median": 130.0}
    rows = [
        {"arm": rungs.SPARSE_DIST, "ranks": 2, "bytes_per_step": {"dense": 4_000_000, "rows": 1e6}},
        {"arm": rungs.PRODUCT, "ranks": 2, "bytes_per_step": {"dense": 4_000_000, "rows": 0.0}},
    ]
    add_link_time(rows, "200mbit")
    assert [row["link_ms"] for row in rows] == [100.0, 80.0]
    by = {row["arm"]: row | {"step_ms": median} for row in rows}
    said = describe_link(by, "`", rungs.SPARSE_DIST, rungs.PRODUCT)
    assert "100 ms of the 130" in said and "80 ms of the 130" in said
    assert describe_link({rungs.PRODUCT: {}}, "`", rungs.SPARSE_DIST, rungs.PRODUCT) == ""
