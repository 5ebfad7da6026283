"""DLRM with 26 pooled tables and Zipf ids, by pooling factor: samples/s in FreeScale and in
TorchRec's TrainPipelineSparseDist, with the same batches and initial rows.

Tables are row-wise on both sides. TorchRec pools on the owner and sends sums, whose size does not
depend on the pooling factor. FreeScale sends rows, each once per rank and step, and its staged
schedule prefetches them: bytes grow with the number of distinct ids. Two hosts, one pinned core
each, with a slow network (testbed A), or GPU ranks that may share one GPU through MPS (testbed C),
where NCCL runs over loopback sockets.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import exp, log
from typing import Any

from freescale.launch.ranks import is_rank
from freescale.ledger.merge import merge_step
from freescale_bench.common.hosts import RATE, open_hosts
from freescale_bench.common.ranks import (
    gather_json,
    get_gpu_name,
    get_gpu_settings,
    join,
    start_ranks,
)
from freescale_bench.common.results import (
    Claim,
    Destination,
    Row,
    at_least,
    show_claims,
    spread,
    write,
)
from freescale_bench.torchrec.arms import OURS, TORCHREC, measure
from freescale_bench.torchrec.dlrm import Shape

FACTORS = (1, 4, 20, 100)
HOSTS = Shape()
GPUS = Shape(
    rows=1_000_000, width=128, samples=2048, bottom=(512, 256), top=(1024, 1024, 512, 256, 1)
)  # the layers of MLPerf's DLRM
TRIAL = Shape(rows=500, width=16, samples=32, bottom=(32,), top=(32, 1), batches=2)
GOALS = {"hosts": 1.5, "gpus": 1.3}
LIMIT, SECONDS = 900.0, 120.0  # limits of a whole run and of a collective


def shape_of(base: Shape, factor: int) -> Shape:
    """Returns the shape at a factor, with fewer samples at large factors to limit memory and
    time."""
    return replace(base, factor=factor, samples=max(1, base.samples // max(1, factor // 20)))


def summarize(factor: int, shape: Shape, ranks: Sequence[dict[str, dict[str, Any]]]) -> list[Row]:
    """Makes a row per arm from the results of all ranks."""
    rows: list[Row] = []
    samples = shape.samples * len(ranks)
    losses = {
        OURS: ranks[0][OURS]["losses"],
        TORCHREC: [sum(each) for each in zip(*(r[TORCHREC]["losses"] for r in ranks), strict=True)],
    }
    for arm in (OURS, TORCHREC):
        turns = list(zip(*(rank[arm]["step_ms"] for rank in ranks), strict=True))
        slowest = [max(turn) for turn in turns]
        cpu = [statistics.fmean(t) for t in zip(*(r[arm]["cpu_ms"] for r in ranks), strict=True)]
        steps = [merge_step(each) for each in zip(*(r[arm]["records"] for r in ranks), strict=True)]
        row: Row = {
            "factor": factor,
            "samples": samples,
            "arm": arm,
            "samples_per_second": spread([1e3 * samples / ms for ms in slowest]),
            "step_ms": spread(slowest),
            "cpu_ms": spread(cpu),
            "largest_loss_difference": max(
                abs(a - b) for a, b in zip(losses[arm], losses[TORCHREC], strict=True)
            ),
        }
        if steps:  # on a GPU the ledger records nothing of TorchRec
            row["exposed_ms"] = _medians([step["exposed_ms"] for step in steps])
            row["bytes_per_step"] = _medians([step["bytes"] for step in steps])
            row["spans_ms"] = _medians([step["spans_ms"] for step in steps])
        if arm == OURS:
            row["transport"] = ranks[0][arm]["transport"]
        rows.append(row)
        print(
            f"factor {factor:3d}  {arm:32s} {row['samples_per_second']['median']:8.0f} samples/s  "
            f"step {row['step_ms']['median']:7.1f} ms  processor {row['cpu_ms']['median']:7.1f} ms",
            flush=True,
        )
    return rows


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        name: round(statistics.median(each.get(name, 0.0) for each in found), 3)
        for name in found[0]
    }


def find_crossover(ratios: dict[int, float]) -> float | None:
    """Returns the pooling factor from which TorchRec is faster, interpolated linearly in log-log
    space; None if there is none."""
    known = sorted(ratios.items())
    for (low, above), (high, below) in zip(known, known[1:], strict=False):
        if above >= 1 > below:
            part = log(above) / (log(above) - log(below))
            return exp(log(low) + part * (log(high) - log(low)))
    return None


def make_claims(rows: Sequence[Row], testbed: str) -> tuple[list[Claim], dict[str, Any]]:
    """Returns the claim, and the speed over TorchRec's by factor, with the crossover."""
    ratios = {}
    for factor in dict.fromkeys(row["factor"] for row in rows):
        rates = {
            row["arm"]: row["samples_per_second"]["median"]
            for row in rows
            if row["factor"] == factor
        }
        ratios[factor] = rates[OURS] / rates[TORCHREC]
    text = "DLRM, 26 pooled tables, pooling factor 1: samples/s over TorchRec's SparseDist"
    claims = [at_least(text, GOALS[testbed], ratios[1], "x")] if 1 in ratios else []
    found = {str(factor): round(ratio, 3) for factor, ratio in ratios.items()}
    return claims, {"times_torchrec": found, "crossover_factor": find_crossover(ratios)}


def bench_on_hosts(
    factors: Sequence[int], turns: int, each: int, trial: bool, to: Destination
) -> int:
    base = TRIAL if trial else HOSTS
    rows: list[Row] = []
    with open_hosts(2) as network:
        for factor in factors:
            shape = shape_of(base, factor)
            rows += summarize(factor, shape, network.run(measure, shape, turns, each))
    claims, about = make_claims(rows, "hosts")
    if trial:
        show_claims(claims)
        return 0
    write(
        "torchrec-speed",
        "hosts",
        f"freescale bench torchrec --turns {turns} --each {each}",
        rows,
        claims,
        ("torchrec", "fbgemm-gpu-cpu"),
        to=to,
        **about,
        shape=asdict(base),
        method=(
            f"2 hosts, one pinned core each, {RATE} each way (tbf); arms in turn in one process, "
            f"{turns} turns of {each} steps; a step's time is the turn's over its steps, on the "
            "slower rank"
        ),
    )
    return 0


def bench_on_gpus(
    ranks: int, factors: Sequence[int], turns: int, each: int, trial: bool, to: Destination
) -> int:
    """Starts the ranks, or runs as one of them. Returns the exit status."""
    device, base = ("cpu", TRIAL) if trial else ("cuda", GPUS)
    if not is_rank():
        arguments = ["speed", "--device", "cuda", "--turns", str(turns), "--each", str(each)]
        arguments += ["--factors", *map(str, factors), *(["--trial"] if trial else [])]
        return start_ranks("torchrec", [*arguments, *to.as_arguments()], ranks, device, LIMIT, 2)
    transport = join(device, SECONDS)
    rows: list[Row] = []
    for factor in factors:
        shape = shape_of(base, factor)
        where = str(transport.device)
        found = measure(transport.rank, transport.world, shape, turns, each, where)
        everyone = gather_json(transport, found)
        if transport.rank == 0:
            rows += summarize(factor, shape, everyone)
            if not trial:  # after each factor: an interrupted run keeps its results
                _write_gpus(transport.world, turns, each, rows, to)
    if trial and transport.rank == 0:
        show_claims(make_claims(rows, "gpus")[0])
        print("CPU times say nothing about a GPU; nothing is written")
    transport.close()
    return 0


def _write_gpus(ranks: int, turns: int, each: int, rows: list[Row], to: Destination) -> None:
    claims, about = make_claims(rows, "gpus")
    factors = " ".join(dict.fromkeys(str(row["factor"]) for row in rows))
    write(
        f"torchrec-speed-{ranks}ranks",
        get_gpu_name(),
        f"freescale bench torchrec --device cuda --nproc {ranks} --factors {factors} "
        f"--turns {turns} --each {each}",
        rows,
        claims,
        ("torchrec", "fbgemm-gpu"),
        to=to,
        **about,
        shape=asdict(GPUS),
        settings=get_gpu_settings(),
    )
