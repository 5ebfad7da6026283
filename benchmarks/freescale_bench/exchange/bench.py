"""What `freescale bench exchange` measures. Arms take turns in one process per rank, with the same
batches."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.embedding.layout import ShardLayout, TableSpec
from freescale.embedding.two_level import plan_route
from freescale.ledger.merge import merge_step
from freescale_bench.common.arm import Arm
from freescale_bench.common.hosts import RATE, open_hosts
from freescale_bench.common.results import (
    Claim,
    Destination,
    Row,
    at_most,
    show_claims,
    spread,
    write,
)
from freescale_bench.common.turns import take_turns
from freescale_bench.common.workload import Workload, make_batches

HOSTS, RANKS = 2, 2  # ranks of a host
MACHINES = [rank // RANKS for rank in range(HOSTS * RANKS)]
EXCHANGES, SCHEDULES = ("flat", "two-level"), ("serial", "staged")
HOT = Workload(
    rows=250_000, samples=64, median_length=120, sigma=0.0, maximum_length=240, popularity=1.05,
    hidden=(32,), steps=8,
)  # fmt: skip
WORKLOADS = {
    "hot ids (Zipf 1.05)": HOT,
    "hot ids, 20,000 rows": replace(HOT, rows=20_000),
    "no id twice (control)": replace(HOT, popularity="unique", collisions=0.1),
}
POINTS = 2.0  # that measured savings may differ from the share of duplicates


class Counted:
    """An arm whose turns are measured by the network device of its host, in both directions."""

    def __init__(self, arm: Arm, device: str) -> None:
        self._arm, self._device, self.ledger = arm, device, arm.ledger
        self._begun: int | None = None
        self.turns: list[int] = []

    def step(self) -> float:
        if self._begun is None:
            dist.barrier()
            self._begun = read_link(self._device)
            dist.barrier()
        return self._arm.step()

    def quiet(self) -> None:
        self._arm.quiet()
        dist.barrier()
        assert self._begun is not None
        self.turns.append(read_link(self._device) - self._begun)
        self._begun = None

    def digest(self) -> str:
        """Of this rank's part of the table, once nothing is deferred."""
        self._arm.pipeline.flush()
        state = self._arm.parallel.tables.get_local_state("item")
        parts = b"".join(state[name].numpy().tobytes() for name in sorted(state))
        return hashlib.sha256(parts).hexdigest()


def read_link(device: str) -> int:
    """Bytes that this namespace's network device has sent and received."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            fields = numbers.split()
            return int(fields[0]) + int(fields[8])
    raise ValueError(f"there is no network device {device}")


def measure(
    rank: int, world: int, workload: Workload, devices: Sequence[str], repetitions: int
) -> dict[str, dict[str, Any]]:
    device = devices[rank // RANKS]

    def build(schedule: str, exchange: str) -> Counted:
        options = {"exchange": exchange, "dense_sums": "collective"}  # auto may sum in any order
        return Counted(Arm(workload, rank, world, schedule, "auto", **options), device)

    arms = {f"{one} {other}": build(one, other) for one in SCHEDULES for other in EXCHANGES}
    found = take_turns(arms, repetitions, 2)  # the second step of a turn is counted
    for name, arm in arms.items():
        found[name] |= {"link": arm.turns[1:], "digest": arm.digest()}
    return found


def count_crossings(workload: Workload, steps: Sequence[int]) -> dict[str, float]:
    """Rows that cross between machines in the mean of these steps, by exchange, from the ids."""
    world = len(MACHINES)
    layout = ShardLayout((TableSpec("item", workload.rows, 1, torch.float32, ()),), world)
    batches = [make_batches(workload, rank, world) for rank in range(world)]
    routes = [plan_route("two-level", MACHINES, rank) for rank in range(world)]
    totals = dict.fromkeys(EXCHANGES, 0)
    for step in steps:
        wanted: dict[str, list[np.ndarray]] = {name: [] for name in EXCHANGES}
        for rank in range(world):
            ids = batches[rank][step % workload.steps][0]
            keys = np.unique(layout.compute_keys(0, ids).numpy())
            owner = keys // layout.size
            far = np.array(MACHINES)[owner] != MACHINES[rank]
            through = np.array(routes[rank].through)[owner]
            # who asks for a row: the rank itself, or its leader for the owner
            wanted["flat"].append(rank * world * layout.size + keys[far])
            wanted["two-level"].append(through[far] * world * layout.size + keys[far])
        for name, parts in wanted.items():
            totals[name] += len(np.unique(np.concatenate(parts)))
    return {name: total / len(steps) for name, total in totals.items()}


def summarize(name: str, workload: Workload, ranks: list[dict[str, dict[str, Any]]]) -> list[Row]:
    """A row per arm."""
    rows = []
    for arm in ranks[0]:
        found = [rank[arm] for rank in ranks]
        steps = list(zip(*(rank["records"] for rank in found), strict=True))
        figures = [merge_step(records) for records in steps]
        slowest = [max(r["end"] - r["begin"] for r in records) / 1e6 for records in steps]
        numbers = [records[0]["step"] for records in steps]
        schedule, exchange = arm.split(" ", 1)
        per_turn = [sum(turn) / 2 / 2 for turn in zip(*(f["link"] for f in found[::RANKS]))]
        row = {
            "configuration": name,
            "schedule": schedule,
            "exchange": exchange,
            "step_ms": spread(slowest),
            "bytes_between_machines": statistics.fmean(
                f["bytes_between_machines"] for f in figures
            ),
            # both hosts see every byte, and a turn has two steps
            "link_bytes_per_step": statistics.fmean(per_turn),
            "rows_between_machines_by_ids": count_crossings(workload, numbers)[exchange],
            "losses": found[0]["losses"],
            "digests": [rank["digest"] for rank in found],
        }
        rows.append(row)
    reference = {row["exchange"]: row for row in rows if row["schedule"] == "serial"}
    for row in rows:
        serial = reference[row["exchange"]]
        row["equals_serial"] = all(row[part] == serial[part] for part in ("losses", "digests"))
    for row in rows:
        first, last = row["losses"][0], row.pop("losses")[-1]
        row |= {"first_loss": first, "last_loss": last}
        row["table_sha256"] = hashlib.sha256("".join(row.pop("digests")).encode()).hexdigest()
        print(
            f"{name:20s} {row['schedule']:7s} {row['exchange']:10s} "
            f"{row['step_ms']['median']:7.1f} ms  between machines "
            f"{row['bytes_between_machines'] / 1e6:.3f} MB, link "
            f"{row['link_bytes_per_step'] / 1e6:.3f} MB a step  equals serial: "
            f"{row['equals_serial']}",
            flush=True,
        )
    return rows


def compute_savings(rows: Sequence[Mapping[str, Any]], figure: str) -> dict[tuple[str, str], float]:
    """How many percent of a figure the two-level exchange saves, by configuration and schedule."""
    by_arm = {(r["configuration"], r["schedule"], r["exchange"]): float(r[figure]) for r in rows}
    return {
        (name, schedule): 100 * (1 - by_arm[name, schedule, "two-level"] / flat)
        for (name, schedule, exchange), flat in by_arm.items()
        if exchange == "flat"
    }


def make_claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    duplicates = compute_savings(rows, "rows_between_machines_by_ids")
    claims = []
    for figure, text in (
        ("bytes_between_machines", "bytes between machines, by the ledger"),
        ("link_bytes_per_step", "bytes of the link, by its device"),
    ):
        for (name, schedule), saved in compute_savings(rows, figure).items():
            share = duplicates[name, schedule]
            claims.append(
                at_most(
                    f"{name}, {schedule}: {text}: saved {saved:.1f} %, off the share of duplicate "
                    f"rows, {share:.1f} %, by",
                    POINTS,
                    abs(saved - share),
                    "points",
                )
            )
    for exchange in EXCHANGES:
        wrong = sum(not r["equals_serial"] for r in rows if r["exchange"] == exchange)
        text = f"{exchange}: staged runs whose losses or tables differ from serial's in any bit"
        claims.append(at_most(text, 0.0, wrong, "runs"))
    return claims


def bench_exchange(repetitions: int, trial: bool, to: Destination) -> None:
    repetitions, rows = 2 if trial else repetitions, []
    with open_hosts(HOSTS) as network:
        for name, workload in WORKLOADS.items():
            found = network.run(measure, workload, network.devices, repetitions, ranks=RANKS)
            rows += summarize(name, workload, found)
    claims = make_claims(rows)
    if trial:
        show_claims(claims)
        return
    write(
        "peer-exchange",
        "cpu",
        f"freescale bench exchange --repetitions {repetitions}",
        rows,
        claims,
        to=to,
        workloads={name: asdict(workload) for name, workload in WORKLOADS.items()},
        method=(
            f"{HOSTS} hosts (network namespaces) of {RANKS} ranks that share a core, {RATE} each "
            f"way (tbf), hostwire; arms in turn in one process per rank, {repetitions} turns of 2 "
            "steps; step times are of the second step and the slowest rank, bytes of the link of "
            "both, in both directions"
        ),
    )
