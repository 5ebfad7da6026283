"""What the three parts share: batches, the model and its pipeline, and starting the ranks."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.batch import Jagged, SequenceBatch
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.pipeline.pipeline import Pipeline
from freescale.transport.api import Transport
from freescale_bench.common.ranks import get_gpu_name, start_ranks

ITEMS, NEGATIVES = 20_000, 64
WHOLE, SPLIT = "whole", "split"  # arms
SETTINGS = {WHOLE: "off", SPLIT: "auto"}


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    lengths: tuple[int, ...]  # of the histories of a global batch

    def describe(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("width", "layers", "heads")}
        events = {"longest": max(self.lengths), "others": len(self.lengths) - 1}
        return sizes | events | {"tokens": sum(self.lengths)}


@dataclass(frozen=True)
class Setting:
    """The options of a part."""

    device: str
    ranks: int
    steps: int
    trial: bool
    profiled: int = 0  # steps

    @property
    def testbed(self) -> str:
        return get_gpu_name() if self.device == "cuda" else "cpu"

    @property
    def limit(self) -> float:
        """Seconds of a run of ranks, and of a wait in it."""
        return 240.0 if self.device == "cuda" else 1800.0

    def name_command(self, part: str) -> str:
        return f"freescale bench split {part} --device {self.device}"

    def run_ranks(self, part: str, arm: str, ranks: int, may_fail: bool = False) -> Any:
        """What rank 0 of so many ranks has found, each in a new process; None if they failed."""
        with tempfile.TemporaryDirectory() as temporary:
            output = Path(temporary) / "found.json"
            words = [part, "--arm", arm, "--output", str(output), "--device", self.device]
            words += ["--nproc", str(ranks), "--steps", str(self.steps)]
            words += ["--profiled", str(self.profiled)]
            words += ["--trial"] if self.trial else []
            threads, begin = 1 if self.device == "cpu" else 2, time.perf_counter()
            print(f"{part} {arm if part != 'exact' else ''}: {ranks} ranks", flush=True)
            status = start_ranks("split", words, ranks, self.device, self.limit, threads)
            print(f"  ended with status {status}, {time.perf_counter() - begin:.0f} s", flush=True)
            if status and not may_fail:
                raise ValueError(f"the ranks of {part}, {arm}, failed: status {status}")
            if not output.exists():
                return None
            found = json.loads(output.read_text(encoding="utf-8"))
            print(f"  {json.dumps(found)[:400]}", flush=True)
            return found


def make_batch(shape: Shape, rank: int, world: int, number: int) -> SequenceBatch:
    """A rank's share of a global batch; the longest history is in the first."""
    count = len(shape.lengths)
    mine = range(count * rank // world, count * (rank + 1) // world)
    if count < world:
        mine = range(count if rank == 0 else 0)
    lengths = torch.tensor([shape.lengths[place] for place in mine], dtype=torch.int64)
    random = np.random.default_rng((11, rank, number))
    tokens = int(lengths.sum())

    def draw(*size: int) -> torch.Tensor:
        return torch.from_numpy(random.integers(0, ITEMS, size))

    times = torch.from_numpy(random.exponential(3600, tokens).astype(np.int64)).cumsum(0)
    columns = {"history": draw(tokens), "targets": draw(tokens), "timestamps": times}
    return SequenceBatch(
        sequences={name: Jagged(values, lengths) for name, values in columns.items()},
        dense={"negatives": draw(len(mine), NEGATIVES)},
        weights={"next_item": lengths.double()},
        keys=torch.tensor(list(mine), dtype=torch.int64) + 1000 * number,
        number=number,
    )


def build_pipeline(
    shape: Shape, transport: Transport, split: str, *, dtype: torch.dtype = torch.float32,
    schedule: str = "staged", precision: str = "fp32", row_rate: float = 1.0,
) -> Pipeline:  # fmt: skip
    """SGD, so that rows after a step show its gradients."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": shape.width, "layers": shape.layers, "heads": shape.heads}
    encoder = HSTU(**sizes, max_length=max(shape.lengths), dropout=0.1)
    module = Retrieval(encoder, num_items=ITEMS, table_device="meta").to(dtype)
    parallel = freescale.parallelize(
        module, module.features, freescale.SGD(lr=row_rate), transport=transport,
        placement="sharded", init_std=0.1,
    )  # fmt: skip
    head = shape.width // shape.heads
    cost = CostModel.of_hstu(**sizes, d_qk=head, d_v=head, negatives=NEGATIVES)
    return Pipeline(
        parallel,
        torch.optim.SGD(parallel.dense_parameters(), lr=1.0),
        schedule=schedule,
        precision=precision,
        dense_sums="collective",
        balance=Balancer("greedy", cost, split_histories=split),
    )


def shrink(shape: Shape, factor: int) -> Shape:
    """For trials."""
    lengths = tuple(max(4, length // factor) for length in shape.lengths)
    return replace(shape, width=16, layers=2, heads=2, lengths=lengths)
