"""The train ladder: `freescale train` with its defaults against TorchRec's pipelines. All train the
same Retrieval model on the same histories file, batch by batch.

Our arms are a `Trainer`, with its loader, model, optimizer, pipeline, logs and ledger. The
configuration sets only the shape of the model and the batch. TorchRec's arms
(benchmarks/peers/torchrec/retrieval_arms.py) train the module that `freescale train` builds, on a
row-wise EmbeddingCollection, and prefetch from the same loader in a thread. Arms take turns in one
process. Step time is a turn's time over its steps, in every arm.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from freescale.config import RunConfig
from freescale.data.synthetic.generate import generate
from freescale.launch.ranks import is_rank
from freescale.ledger.ledger import Ledger
from freescale.train.trainer import Trainer
from freescale_bench.common.arm import Running, open_transport
from freescale_bench.common.ranks import (
    gather_json,
    get_gpu_name,
    get_gpu_settings,
    join,
    start_ranks,
)
from freescale_bench.common.results import Claim, Destination, Row, at_least, at_most, write
from freescale_bench.common.torchrec import build_torchrec_retrieval
from freescale_bench.common.turns import make_rows, time_turns
from freescale_bench.ladder.arms import PIPELINES, WARM_UP, build_arms, list_peers
from freescale_bench.ladder.gpu import LIMIT
from freescale_bench.ladder.rungs import (
    PRODUCT,
    SERIAL,
    SPARSE_DIST,
    UNBALANCED,
    Rung,
    add_link_time,
)

_ROWS = {"row_optimizer": "rowwise_adagrad"}  # TorchRec has no Adam on CPUs
_TRIAL = {"negatives": 16, "placement": "sharded"}
# Shapes of the paper ladder: the paper's divided by 3 on a GPU, by 20 on CPU hosts.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "file": {"users": 2560, "items": 4_000_000, "median": 1000.0, "cap": 7000},
        "settings": {"max_length": 7000, "width": 256, "layers": 5, "heads": 2},
        "batch": {"samples": 32},
    },
    "cpu": {
        "file": {"users": 2048, "items": 400_000, "median": 150.0, "cap": 1050},
        "settings": {"max_length": 1050, "width": 64, "layers": 1, "heads": 2, **_ROWS},
        "batch": {"samples": 16},
    },
    # Histories of a few events, as in shops: shows the cost of a step besides its compute.
    "short": {
        "file": {"users": 16384, "items": 340_000, "median": 6.0, "cap": 300},
        "settings": {"max_length": 300, "width": 256, "layers": 1, "heads": 2, **_ROWS},
        "batch": {"samples": 16},
    },
    "trial": {
        "file": {"users": 128, "items": 5_000, "median": 20.0, "cap": 80},
        "settings": {"max_length": 80, "width": 16, "layers": 1, "heads": 2, **_ROWS, **_TRIAL},
        "batch": {"samples": 4},
    },
}
# targets of samples/s over SparseDist's: by number of GPU ranks; on CPU hosts by shape
TARGETS = {4: 1.7, 8: 2.7}
HOST_TARGETS = {"short": 1.5}
# largest relative difference of first losses; GPUs compute in bf16
FIRST_LOSS = {"cuda": 1e-3, "cpu": 1e-5}
_STEPS_ON_HOSTS = 8  # per turn
# Changes of the rungs to the defaults.
CHANGED = {
    SERIAL: asdict(Rung("serial", "none", False, "collective", "collective")),
    UNBALANCED: {"balance": "none", "balance_adapt": False},
}


def make_config(shape: str, world: int, device: str, path: Path) -> RunConfig:
    """Returns the configuration of the rung `freescale train`: a shape, and otherwise defaults."""
    chosen = SHAPES[shape]
    given = {
        "data": str(path),
        "device": device,
        "global_batch": chosen["batch"]["samples"] * world,
        "profile_steps": 0,  # do not profile timed steps
        **chosen["settings"],
    }
    return RunConfig.from_settings(given)


class ProductArm(Running):
    """One rank of `freescale train`, with the methods of the other arms."""

    def __init__(
        self, config: RunConfig, folder: Path, histories: Path, device: torch.device | str
    ) -> None:
        self.ledger = Ledger(device)
        transport, self.carrier = open_transport(device, self.ledger, config.train.transport)
        self.trainer = Trainer(config, folder, histories=histories, transport=transport)
        self.pipeline, self._steps = self.trainer.pipeline, self.trainer.iterate()

    def find_options(self) -> dict[str, Any]:
        """Returns the options in effect, with `auto` resolved."""
        settings = asdict(self.trainer.config.train)
        names = ("schedule", "balance", "balance_adapt", "dense_sums", "precision")
        chosen = self.pipeline.state_dict()["choices"]
        return {name: settings[name] for name in names} | {"transport": self.carrier, **chosen}


def build_arm(
    name: str, config: RunConfig, histories: Path, device: torch.device, batches: int
) -> Any:
    """Builds an arm. `batches`: the most that it trains or prefetches. Its run folder is next to
    the histories."""
    if name in PIPELINES:
        return build_torchrec_retrieval(
            config, histories, PIPELINES[name], device=device, batches=batches
        )
    config = replace(config, train=replace(config.train, **CHANGED.get(name, {})))
    return ProductArm(config, histories.parent / name.replace(" ", "-"), histories, device)


def run_arms(
    rank: int, world: int, shape: str, device: torch.device | str, turns: int, each: int, file: str
) -> dict[str, Any]:
    """Measures all arms as one rank of a process group. `file`: the histories; run folders are
    created next to it."""
    device, histories = torch.device(device), Path(file)
    config = make_config(shape, world, device.type, histories)
    lead = 0 if device.type == "cuda" else 1
    batches = WARM_UP + (turns + 1) * (lead + each) + 4  # for prefetching
    build = partial(build_arm, config=config, histories=histories, device=device, batches=batches)
    names = [*list_peers(device), SERIAL, UNBALANCED, PRODUCT]
    arms, peaks, first = build_arms(names, build, device)
    found = {"found": time_turns(arms, device, turns, each, lead), "peaks": peaks, "first": first}
    found["options"] = {name: arms[name].find_options() for name in (*CHANGED, PRODUCT)}
    return found


def make_claims(
    rows: list[Row], first: dict[str, list[float]], target: float | None, apart_at_most: float
) -> list[Claim]:
    """Makes the claims. `first`: losses of each arm's first steps; `target`: samples/s over
    SparseDist's."""
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
    """Returns rows, claims and the description of the workload."""
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
    """Starts the ranks, or runs as one of them, with `histories`. Returns the exit status."""
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
    everyone = gather_json(collective, found)
    if collective.rank == 0:
        rows, claims, workload = summarize(everyone, shape, on.type == "cuda")
        if trial:
            print("CPU times say nothing about a GPU; nothing is written")
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
    """Runs on two CPU hosts or on the loopback. `kind`: train or short."""
    from freescale_bench.common.hosts import RATE
    from freescale_bench.ladder.bench import open_testbed

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
