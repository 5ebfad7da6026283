"""The ladder on two CPU ranks: TorchRec's pipelines, then FreeScale with one technique more on each
rung and with the defaults of `freescale train`, on the same model, data and seeds.

Runs in two network namespaces of this machine with 200 Mbit/s between them (testbed A, set up and
removed here, as root), else with two ranks on its loopback. Each rank is pinned to a core. Arms
take turns in one process. The model is HSTU on a sharded table, also in the arm `defaults`, which
would replicate a table this small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from freescale_bench.common.hosts import RATE, Loopback, can_open_hosts, open_hosts
from freescale_bench.common.results import Claim, Destination, Row, at_least, at_most, write
from freescale_bench.common.torchrec import has_pec, has_torchrec
from freescale_bench.common.workload import Workload
from freescale_bench.ladder.arms import BASE, PEC, measure, train_alone
from freescale_bench.ladder.rungs import FULL, OURS, PARTITIONED, PERMUTED, SERIAL, SPARSE_DIST
from freescale_bench.staged.rows import summarize

WORLD = 2
# The paper's shape divided by 20: log-normal histories of median 3,000 and at most 21,000 items, 12
# % collisions.
PAPER = Workload(
    rows=400_000, width=256, samples=16, median_length=150, sigma=1.0, maximum_length=1050,
    collisions=0.12, layers=1, steps=12,
)  # fmt: skip
PARITY_STEPS = 24
_EXPOSED = {
    "exposed_embedding_ms": "exposed communication of ids, rows and gradients",
    "exposed_all_ms": "all exposed communication, dense gradients, counts and samples included,",
}
_FASTER = 1.8  # target of the full system: times SparseDist's samples/s
Run = Callable[..., list[Any]]


def check_parity(run: Run, names: list[str]) -> dict[str, Any]:
    """Compares the losses of the first steps of each arm with serial's. The control is serial with
    the samples of each batch permuted."""
    found = {name: run(train_alone, PAPER, name, PARITY_STEPS) for name in [*names, PERMUTED]}
    serial = found[SERIAL][0]["losses"]
    apart = {
        name: [abs(a - b) / abs(b) for a, b in zip(ranks[0]["losses"], serial, strict=True)]
        for name, ranks in found.items()
    }
    return {
        name: {
            "first_step_relative_loss_difference_to_serial": apart[name][0],
            "largest_relative_loss_difference_to_serial": max(apart[name]),
            "last_loss": ranks[0]["losses"][-1],
            "peak_memory_bytes_per_rank": [rank["peak"] for rank in ranks],
        }
        for name, ranks in found.items()
    }


def make_rows(
    measured: list[dict[str, Any]], names: list[str], together: dict[str, Any]
) -> list[Row]:
    rows = []
    for name in names:
        figures = summarize(
            [rank[name] for rank in measured], measured[0][SERIAL]["losses"], PAPER.samples * WORLD
        )
        figures["straggler_percent"] = (
            100 * figures["straggler_ms"]["median"] / figures["step_ms"]["median"]
        )
        rows.append({"arm": name, **figures, **together.get(name, {})})
        if name in OURS:
            rows[-1]["options"] = measured[0][name]["options"]
        shown = {
            key: figures[key]["median"]
            for key in ("samples_per_second", "step_ms", "exposed_embedding_ms", "exposed_all_ms")
        }
        print(
            f"{name:34s}", "  ".join(f"{key} {value:.1f}" for key, value in shown.items()), end="  "
        )
        apart = rows[-1]["largest_relative_loss_difference_to_serial"]
        print(
            f"straggler {figures['straggler_percent']:.1f} %  compute "
            f"{figures['compute_ms']:.1f} "
            f"ms  loss apart {apart:.0e}",
            flush=True,
        )
    return rows


def make_claims(rows: list[Row], together: dict[str, Any]) -> list[Claim]:
    by = {row["arm"]: row for row in rows}
    if SPARSE_DIST not in by:
        return []
    full, peer = by[FULL], by[SPARSE_DIST]
    below = {key: 100 * (1 - full[key]["median"] / peer[key]["median"]) for key in _EXPOSED}
    straggler = peer["straggler_percent"] / max(full["straggler_percent"], 1e-9)
    speed = full["samples_per_second"]["median"] / peer["samples_per_second"]["median"]
    first = max(together[name]["first_step_relative_loss_difference_to_serial"] for name in by)
    later = max(together[name]["largest_relative_loss_difference_to_serial"] for name in by)
    control = together[PERMUTED]["largest_relative_loss_difference_to_serial"]
    return [
        *(
            at_least(f"full system: {text} below TorchRec's", 90.0, below[key], "%")
            for key, text in _EXPOSED.items()
        ),
        at_least("full system: straggler % below TorchRec SparseDist's", 5.0, straggler, "times"),
        at_least("full system: samples/s over TorchRec SparseDist's", _FASTER, speed, "times"),
        at_most(
            "largest relative difference of the first step's loss to serial's", 1e-5, first, ""
        ),
        at_most(
            "largest later difference over that of permuted samples", 1.0, later / control, "times"
        ),
    ]


def bench_ladder(repetitions: int, to: Destination) -> None:
    peers = [BASE, SPARSE_DIST] if has_torchrec() else []
    peers += [PEC] if has_pec() else []
    names = [*peers, *(name for name in OURS if name != PARTITIONED)]  # PARTITIONED: for GPUs
    with open_testbed() as (run, testbed):
        together = check_parity(run, names)
        measured = run(measure, PAPER, names, repetitions, 3)
    rows = make_rows(measured, names, together)
    write(
        "ladder-paper",
        testbed,
        f"freescale bench ladder --repetitions {repetitions}",
        rows,
        make_claims(rows, together),
        ("torchrec", "fbgemm-gpu-cpu"),
        to=to,
        workload=asdict(PAPER),
        parity=together,
        rate=RATE if testbed == "hosts" else "loopback",
    )


def compare_short() -> None:
    """Compares serial with the full system in a few turns, and writes no results."""
    names = [SERIAL, FULL]
    with open_testbed() as (run, _):
        measured = run(measure, PAPER, names, 4, 3)
    serial, full = (row["samples_per_second"]["median"] for row in make_rows(measured, names, {}))
    print(
        f"the full system trains {full / serial:.2f} times as many samples/s as serial on "
        "this machine"
    )


@contextmanager
def open_testbed() -> Iterator[tuple[Run, str]]:
    """Yields a function that runs another on every rank, and the testbed's name."""
    if can_open_hosts():
        with open_hosts(WORLD) as network:
            yield network.run, "hosts"
        return
    print(
        "no root or no iproute2: two ranks on this machine's loopback instead of hosts with a "
        "slow network",
        flush=True,
    )
    yield Loopback(WORLD).run, "loopback"
