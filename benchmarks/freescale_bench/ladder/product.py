"""The ladder of the product: `freescale train` with its defaults beside TorchRec's pipelines, all
of them training the same Retrieval model on the same histories file, batch by batch.

Our arms are a `Trainer`: its loader, model, optimizer and pipeline, its logs and its ledger; a
configuration gives the shape of model and batch, everything else is a default. TorchRec's arms
(benchmarks/peers/torchrec/retrieval_arms.py) train the module that `freescale train` builds, behind
a row-wise EmbeddingCollection, and read the same loader ahead in a thread. Arms take turns in one
process; a step's time is that of a turn over its steps, the same for every arm.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.config import RunConfig
from freescale.data.synthetic.generate import generate
from freescale.launch.ranks import is_rank
from freescale.ledger.ledger import Ledger
from freescale.train.trainer import Trainer
from freescale_bench.common.arm import open_transport, wait_for_lanes
from freescale_bench.common.machine import get_gpu_name, get_gpu_settings
from freescale_bench.common.ranks import join, start_ranks
from freescale_bench.common.results import Claim, Destination, Row, at_least, at_most, write
from freescale_bench.common.torchrec import build_torchrec_retrieval, has_torchrec
from freescale_bench.common.turns import make_rows, time_turns, wait_idle
from freescale_bench.ladder.arms import BASE, PIPELINES, SEMI_SYNC
from freescale_bench.ladder.gpu import LIMIT
from freescale_bench.ladder.product_shapes import FIRST_LOSS, HOST_TARGETS, SHAPES, TARGETS
from freescale_bench.ladder.rungs import PRODUCT, SERIAL, SPARSE_DIST, UNBALANCED, Rung

_WARM_UP = 2  # steps before the first turn
_STEPS_ON_HOSTS = 8  # of a turn
# Beside the defaults: what the rungs change of them.
CHANGED = {
    SERIAL: asdict(Rung("serial", "none", False, "collective", "collective")),
    UNBALANCED: {"balance": "none", "balance_adapt": False},
}


def make_config(shape: str, world: int, device: str, path: Path) -> RunConfig:
    """Of the rung `freescale train`: the shape is given, all else is a default."""
    chosen = SHAPES[shape]
    given = {
        "data": str(path),
        "device": device,
        "global_batch": chosen["batch"]["samples"] * world,
        "profile_steps": 0,  # what is timed is not profiled
        **chosen["settings"],
    }
    return RunConfig.from_settings(given)


class ProductArm:
    """One rank of `freescale train`, with the verbs of the other arms."""

    def __init__(
        self, config: RunConfig, folder: Path, histories: Path, device: torch.device | str
    ) -> None:
        self.ledger = Ledger(device)
        transport, self.carrier = open_transport(device, self.ledger, config.train.transport)
        self.trainer = Trainer(config, folder, histories=histories, transport=transport)
        self._steps = self.trainer.iterate()

    def step(self) -> float:
        return float(self.begin_step())

    def begin_step(self) -> Tensor:
        """The loss of the next step, not read yet."""
        return next(self._steps).total

    def quiet(self) -> None:
        wait_for_lanes(self.trainer.pipeline)

    def find_options(self) -> dict[str, Any]:
        """As they turned out: what `auto` stood for."""
        settings = asdict(self.trainer.config.train)
        names = ("schedule", "balance", "balance_adapt", "dense_sums", "precision")
        chosen = self.trainer.pipeline.state_dict()["choices"]
        return {name: settings[name] for name in names} | {"transport": self.carrier, **chosen}


def build_arm(
    name: str, config: RunConfig, histories: Path, device: torch.device, batches: int
) -> Any:
    """`batches`: that its steps and what is fetched ahead of them need. Runs lie beside the
    histories."""
    if name in PIPELINES:
        return build_torchrec_retrieval(
            config, histories, PIPELINES[name], device=device, batches=batches
        )
    config = replace(config, train=replace(config.train, **CHANGED.get(name, {})))
    return ProductArm(config, histories.parent / name.replace(" ", "-"), histories, device)


def run_arms(
    rank: int, world: int, shape: str, device: torch.device | str, turns: int, each: int, file: str
) -> dict[str, Any]:
    """What one rank of a process group measures. `file`: the histories, in a folder that takes the
    runs too."""
    device, histories = torch.device(device), Path(file)
    config = make_config(shape, world, device.type, histories)
    lead = 0 if device.type == "cuda" else 1
    batches = _WARM_UP + (turns + 1) * (lead + each) + 4  # a pipeline fetches ahead
    peers = [BASE, SPARSE_DIST, SEMI_SYNC] if has_torchrec() else []
    if not peers and rank == 0:
        print("TorchRec is not installed here: its arms are left out", flush=True)
    elif device.type != "cuda" and peers:
        peers.remove(SEMI_SYNC)  # needs CUDA
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    arms, peaks, first = {}, {}, {}
    on_gpu = device.type == "cuda"
    for name in [*peers, SERIAL, UNBALANCED, PRODUCT]:
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        arms[name] = build_arm(name, config, histories, device, batches)
        first[name] = [arms[name].step() for _ in range(_WARM_UP)]
        wait_idle(device)
        peaks[name] = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        if rank == 0:
            print(f"{name}: built, first losses {first[name]}", flush=True)
    found = {"found": time_turns(arms, device, turns, each, lead), "peaks": peaks, "first": first}
    found["options"] = {name: arms[name].find_options() for name in (*CHANGED, PRODUCT)}
    return found


def make_claims(
    rows: list[Row], first: dict[str, list[float]], target: float | None, apart_at_most: float
) -> list[Claim]:
    """`first`: losses of the first steps of each arm; `asked`: of samples/s over SparseDist's."""
    rate = {row["arm"]: row["samples_per_second"]["median"] for row in rows}
    base = first[SERIAL][0]
    apart = max(abs(losses[0] - base) / abs(base) for losses in first.values())
    found = [
        at_most(
            "largest relative difference of the first step's loss to serial's",
            apart_at_most,
            apart,
            "",
        )
    ]
    if SPARSE_DIST in rate and target is not None:
        text = "freescale train, defaults: samples/s over TorchRec SparseDist's"
        value = rate[PRODUCT] / rate[SPARSE_DIST]
        found.append(at_least(text, target, value, "times"))
    return found


def write_histories(shape: str, folder: str) -> Path:
    return generate(Path(folder) / "histories.parquet", **SHAPES[shape]["file"]).path


def summarize(everyone: list[dict[str, Any]], shape: str, on_gpu: bool) -> tuple[Any, Any, Any]:
    """Rows, claims and the description of the workload."""
    chosen = SHAPES[shape]
    samples = chosen["batch"]["samples"]
    rows = make_rows(everyone, samples, on_gpu)
    target = TARGETS.get(len(everyone)) if on_gpu else HOST_TARGETS.get(shape)
    limit = FIRST_LOSS["cuda" if on_gpu else "cpu"]
    claims = make_claims(rows, everyone[0]["first"], target, limit)
    file = chosen["file"]
    workload = {
        "samples": samples,
        "rows": file["items"],
        "width": chosen["settings"]["width"],
        "median_length": file["median"],
        "maximum_length": file["cap"],
        "generated": file,
        "settings": chosen["settings"],
    }
    return rows, claims, workload


def bench_product_on_gpu(
    ranks: int, turns: int, each: int, trial: bool, histories: str | None, to: Destination
) -> int:
    """Starts the ranks, or is one of them, which has `histories`. Returns the exit status."""
    device, shape = ("cpu", "trial") if trial else ("cuda", "cuda")
    if not is_rank():
        arguments = ["--workload", "train", "--device", "cuda"]
        arguments += ["--turns", str(turns), "--each", str(each)]
        arguments += [*to.as_arguments(), *(["--trial"] if trial else [])]
        with tempfile.TemporaryDirectory(prefix="freescale-ladder-") as folder:
            arguments += ["--histories", str(write_histories(shape, folder))]
            return start_ranks("ladder", arguments, ranks, device, LIMIT, threads=2)
    collective = join(device, 120.0)
    assert histories is not None, "the ranks are started with it"
    on = collective.device
    found = run_arms(collective.rank, collective.world, shape, on, turns, each, histories)
    everyone = [json.loads(part) for part in collective.gather_bytes(json.dumps(found).encode())]
    if collective.rank == 0:
        rows, claims, workload = summarize(everyone, shape, on.type == "cuda")
        if trial:
            print("times on a CPU say nothing about a GPU; nothing is written")
        else:
            command = (
                f"freescale bench ladder --workload train --device cuda --nproc {len(everyone)}"
            )
            write(
                f"ladder-train-{len(everyone)}ranks",
                get_gpu_name(),
                f"{command} --turns {turns} --each {each}",
                rows,
                claims,
                ("torchrec", "fbgemm-gpu", "triton"),
                to=to,
                workload=workload,
                settings=get_gpu_settings(),
            )
    collective.gather_bytes(b"")
    sys.stdout.flush()
    os._exit(0)  # several of NCCL's groups, on one GPU, would wait for each other


def bench_product(kind: str, turns: int, to: Destination) -> None:
    """On two CPU hosts, or on the loopback. `kind`: train or short."""
    from freescale_bench.common.hosts import RATE
    from freescale_bench.ladder.bench import open_testbed
    from freescale_bench.ladder.link import add_link_time

    shape = {"train": "cpu", "short": "short"}[kind]
    with tempfile.TemporaryDirectory(prefix="freescale-ladder-") as folder:
        path = str(write_histories(shape, folder))
        with open_testbed() as (run, testbed):
            everyone = run(run_arms, shape, "cpu", turns, _STEPS_ON_HOSTS, path)
    rows, claims, workload = summarize(everyone, shape, on_gpu=False)
    if testbed == "hosts":
        add_link_time(rows, RATE)
    write(
        f"ladder-{kind}",
        testbed,
        f"freescale bench ladder --workload {kind} --repetitions {turns}",
        rows,
        claims,
        ("torchrec", "fbgemm-gpu-cpu"),
        to=to,
        workload=workload,
        rate=RATE if testbed == "hosts" else "loopback",
    )
