"""The staged schedule on GPU ranks that share one GPU through MPS: serial, staged and the stale
control, in turns; serial over NCCL, the others over hostwire.

One row-wise sharded table of 4 million x 128 with Adagrad, ids unique per rank, about 10 % of a
batch's requests are rows that the batch before reads; a 128-1280-128 layer in bf16 that the rows
pass twelve times: compute 1.2 to 1.3 times as long as serial's communication, dense gradients about
5 % of the bytes. NCCL runs over loopback sockets here: its speed says nothing about NVLink.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import freescale
from freescale.batch import Jagged, SequenceBatch
from freescale.launch.ranks import is_rank
from freescale.ledger.ledger import Ledger
from freescale.ledger.machine import get_gpu_name, get_gpu_settings
from freescale.ledger.merge import merge_step
from freescale.pipeline.staged import Staged
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.process_group import ProcessGroupTransport
from freescale_bench.common.ranks import join, start_ranks
from freescale_bench.common.results import Destination, at_most, write
from freescale_bench.common.spread import spread
from freescale_bench.staged.stale import no_collisions

SHAPES = {
    "cuda": {
        "rows": 4_000_000,
        "width": 128,
        "tokens": 53_000,
        "samples": 128,
        "hidden": 1280,
        "passes": 12,
    },
    # to try it out
    "cpu": {"rows": 20_000, "width": 16, "tokens": 600, "samples": 12, "hidden": 32, "passes": 2},
}
COLLISIONS = 0.1
LIMIT = 600.0  # seconds of a whole run
SECONDS = 120.0  # that a collective may take
EMBEDDING = ("ids", "rows", "gradients")


class Model(nn.Module):
    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.item = nn.Embedding(shape["rows"], shape["width"], device="meta")
        width, hidden = shape["width"], shape["hidden"]
        self.layer = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))
        self.passes = shape["passes"]

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        x = self.item(batch.values("history"))
        for _ in range(self.passes):
            x = x + self.layer(x) / self.passes
        return {"click": x.float().square().mean(1).sum() / 100}


def make_batches(shape: dict[str, int], rank: int, world: int) -> Iterator[SequenceBatch]:
    """Unique ids per rank, disjoint between ranks; a share of them were the neighbour rank's in the
    batch before."""
    tokens, again = shape["tokens"], round(COLLISIONS * shape["tokens"])
    fresh = tokens - again
    lengths = torch.full((shape["samples"],), tokens // shape["samples"])
    lengths[-1] += tokens - int(lengths.sum())
    number = 0
    while True:
        new = (torch.arange(fresh) + fresh * (number * world + rank)) * 7919 % shape["rows"]
        neighbour = (rank + 1) % world
        old = (
            (torch.arange(fresh - again, fresh) + fresh * ((number - 1) * world + neighbour))
            * 7919
            % shape["rows"]
        )
        ids = torch.cat([old, new])
        weights = {"click": torch.ones(shape["samples"])}
        yield SequenceBatch(
            sequences={"history": Jagged(ids, lengths)}, weights=weights, number=number
        )
        number += 1


class Arm:
    def __init__(self, name: str, shape: dict[str, int], given: ProcessGroupTransport) -> None:
        """`given` has the groups. Serial goes over NCCL, the others over hostwire."""
        torch.manual_seed(0)
        device, rank, world = given.device, given.rank, given.world
        if name == "serial":
            self.transport = ProcessGroupTransport(
                device, Ledger(device), group=given.group, control=given.control
            )
        else:
            self.transport = HostwireTransport(device, Ledger(device), given.group, given.control)
        parallel = freescale.parallelize(
            Model(shape),
            {"item": ["history"]},
            freescale.Adagrad(lr=0.01),
            transport=self.transport,
            placement="sharded",
            init_std=0.1,
        )
        stale = partial(Staged, masks=no_collisions)
        self.pipeline = freescale.Pipeline(
            parallel,
            torch.optim.AdamW(parallel.dense_parameters(), lr=1e-3),
            schedule=stale if name == "stale" else name,
            precision="bf16" if device.type == "cuda" else "fp32",
            dense_sums="collective",
        )
        self._steps = self.pipeline.run(make_batches(shape, rank, world))
        self.results: list[Any] = []

    def steps(self, count: int) -> None:
        # read at the end: reading waits for the device
        self.results += [next(self._steps).total for _ in range(count)]
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize()


def measure_peak(name: str, shape: dict[str, int], transport: ProcessGroupTransport) -> int:
    """Bytes on the GPU that an arm alone needs at most: tables, model, steps."""
    if transport.device.type != "cuda":
        return 0
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    arm = Arm(name, shape, transport)
    arm.steps(8)
    arm.pipeline.flush()
    peak = torch.cuda.max_memory_allocated() - before
    if isinstance(arm.transport, HostwireTransport):
        arm.transport.close()
    return peak


def measure(
    transport: ProcessGroupTransport, device: torch.device, turns: int, each: int
) -> dict[str, Any] | None:
    shape = SHAPES[device.type]
    peaks = {name: measure_peak(name, shape, transport) for name in ("serial", "staged")}
    gc.collect()
    arms = {name: Arm(name, shape, transport) for name in ("serial", "staged", "stale")}
    begin = time.perf_counter()
    for turn in range(turns + 1):
        for arm in arms.values():
            arm.steps(each)
        if transport.rank == 0:
            print(
                f"{turn} of {turns} turns of each arm, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
    found: dict[str, Any] = {}
    for name, arm in arms.items():
        records = arm.pipeline.ledger.drain()
        everyone = [
            json.loads(part)
            for part in transport.gather_bytes(json.dumps([records, peaks.get(name, 0)]).encode())
        ]
        merged = [
            merge_step(step) for step in zip(*(records for records, _ in everyone), strict=True)
        ]
        # The first turn warms up; the first step of a turn had its communication done while the
        # other arms ran.
        kept = [
            figures
            for position, figures in enumerate(merged)
            if position >= each and position % each
        ]
        losses = [float(total) for total in arm.results]
        found[name] = {"steps": kept, "losses": losses, "peaks": [bytes_ for _, bytes_ in everyone]}
    return found if transport.rank == 0 else None


def report(found: dict[str, Any], world: int, turns: int, to: Destination | None) -> None:
    """`to`: none, and nothing is written."""
    rows = []
    for name, arm in found.items():
        steps = arm["steps"]
        exposed = [sum(figures["exposed_ms"][kind] for kind in EMBEDDING) for figures in steps]
        rows.append(
            {
                "arm": name,
                "ranks": world,
                "step_ms": spread([figures["step_ms"] for figures in steps]),
                "exposed_embedding_ms": spread(exposed),
                "waited_for_lanes_ms": spread(
                    [figures["spans_ms"].get("arrive", 0.0) for figures in steps]
                ),
                "exposed_ms": {
                    kind: spread([figures["exposed_ms"][kind] for figures in steps])
                    for kind in steps[0]["exposed_ms"]
                },
                "straggler_percent": spread([figures["straggler_percent"] for figures in steps]),
                "compute_ms": spread([sum(figures["compute_ms"]) / world for figures in steps]),
                "collision_percent": spread(
                    [f["collision_percent"] for f in steps if "collision_percent" in f] or [0.0]
                ),
                "spans_ms": {
                    name: spread([f["spans_ms"].get(name, 0.0) for f in steps])
                    for name in steps[-1]["spans_ms"]
                },
                "bytes": steps[-1]["bytes"],
                "gpu_peak_bytes_per_rank": arm["peaks"],
                "losses_equal_serial": arm["losses"] == found["serial"]["losses"],
            }
        )
        shown = {
            key: rows[-1][key]["median"]
            for key in ("step_ms", "exposed_embedding_ms", "waited_for_lanes_ms", "compute_ms")
        }
        print(
            f"{name:7s}", "  ".join(f"{key} {value:.2f}" for key, value in shown.items()), end="  "
        )
        print(
            f"{rows[-1]['collision_percent']['median']:.1f} % collide, losses as serial's: "
            f"{rows[-1]['losses_equal_serial']}"
        )
        print(
            "        "
            + "  ".join(
                f"{name} {value['median']:.2f}" for name, value in rows[-1]["spans_ms"].items()
            )
        )
    serial, staged = rows[0], rows[1]
    # Whatever the main thread waits for its lanes counts, communication or not.
    ours = max(staged["exposed_embedding_ms"]["median"], staged["waited_for_lanes_ms"]["median"])
    ratio = 100 * ours / serial["exposed_embedding_ms"]["median"]
    claims = [
        at_most(
            "staged: exposed embedding communication of serial's, 10 % collisions", 12.0, ratio, "%"
        )
    ]
    batch = SHAPES["cuda"]["tokens"] * (8 + 4 * SHAPES["cuda"]["width"])
    extra = (
        max(
            b - a
            for a, b in zip(
                serial["gpu_peak_bytes_per_rank"], staged["gpu_peak_bytes_per_rank"], strict=True
            )
        )
        / batch
    )
    claims.append(
        at_most(
            "staged: peak memory above serial's, in batches of ids and rows", 1.1, extra, "batches"
        )
    )
    if to is None:
        print("times on a CPU say nothing about a GPU; nothing is written")
        return
    write(
        f"staged-{world}ranks",
        get_gpu_name(),
        f"freescale bench staged --device cuda --nproc {world} --turns {turns}",
        rows,
        claims,
        to=to,
        collisions=COLLISIONS,
        settings=get_gpu_settings(),
    )


def bench_on_gpu(ranks: int, turns: int, each: int, trial: bool, to: Destination) -> int:
    """Starts the ranks, or is one of them. Returns the exit status."""
    device = "cpu" if trial else "cuda"
    if not is_rank():
        arguments = ["--device", "cuda", "--turns", str(turns), "--each", str(each)]
        arguments += [*to.as_arguments(), *(["--trial"] if trial else [])]
        return start_ranks("staged", arguments, ranks, device, LIMIT, threads=2)
    transport = join(device, SECONDS)
    found = measure(transport, transport.device, turns, each)
    if found is not None:
        report(found, transport.world, turns, None if trial else to)
    transport.close()
    return 0
