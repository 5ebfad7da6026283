"""The useful share of a cluster's time under failures, at the paper's setting, with each part of a
failure's cost, by source of the restore."""

from __future__ import annotations

from freescale.config import SimulateConfig
from freescale.simulate.recovery import MEMORY
from freescale.simulate.run import run_simulation
from freescale_bench.common.results import Destination, Row, at_least, write

USUAL = "this-machine"
FAILURE_EVERY = 600.0  # seconds
SNAPSHOT_EVERY = 20  # steps
TARGETS = {64: 0.97, 4096: 0.95}  # by GPUs


def bench_recovery(recovery: str, to: Destination) -> None:
    """`recovery`: the costs of a failure, as for `freescale simulate`."""
    config = SimulateConfig(
        schedule="staged",
        steps=5,
        failure_every=FAILURE_EVERY,
        snapshot_every=SNAPSHOT_EVERY,
        recovery=recovery,
    )
    rows: list[Row] = run_simulation(config, list(TARGETS), report=lambda outcome: None)["useful"]
    for row in rows:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["seconds"].items())
        print(f"{row['gpus']:5d} GPUs, from {row['from']:6s} {row['useful']:.3f} ({parts} s)")
    costs = "" if recovery == USUAL else f", costs {recovery}"
    every = f"useful time at a failure every {FAILURE_EVERY / 60:g} minutes"
    claims = [
        at_least(
            f"{every}, {row['gpus']:,} GPUs{costs}",
            TARGETS[row["gpus"]],
            row["useful"],
            "of the time",
        )
        for row in rows
        if row["from"] == MEMORY
    ]
    command = f"freescale bench simulate recovery --recovery {recovery}"
    write("simulate-recovery", recovery, command, rows, claims, to=to)
