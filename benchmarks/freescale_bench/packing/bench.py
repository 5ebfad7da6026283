"""What packing a rank's batch for the exchange of samples costs on the host, and unpacking what
comes.

The samples of a retrieval batch (histories, times, actions, targets, negatives) go to ranks of
chance, packed and unpacked as every balanced step does it (`freescale.batch_codec`); one thread.
The staged schedule has it in a lane, beside the compute.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from freescale.batch import Jagged, SequenceBatch
from freescale.batch_codec import pack, unpack
from freescale.data.negatives import choose_negatives
from freescale_bench.common.results import Destination, write
from freescale_bench.common.spread import spread

# Samples a rank, median and longest history, ranks: the ladder on hosts and on GPU ranks, the
# paper's batch.
SHAPES = (
    (16, 150, 1050, 2),
    (32, 1000, 7000, 8),
    (128, 3000, 21_000, 8),
    (128, 3000, 21_000, 64),
    (128, 3000, 21_000, 512),
)


def make_batch(samples: int, median: int, longest: int) -> SequenceBatch:
    random = np.random.default_rng(0)
    lengths = torch.from_numpy(
        np.clip(np.rint(random.lognormal(np.log(median), 1.0, samples)), 1, longest).astype(
            np.int64
        )
    )
    sequences = {
        name: Jagged(torch.randint(0, 1 << 40, (int(lengths.sum()),)), lengths)
        for name in ("history", "timestamps", "actions", "targets")
    }
    dense = {"negatives": torch.randint(0, 1 << 40, (samples, choose_negatives(None, "sample")))}
    return SequenceBatch(
        sequences,
        dense=dense,
        weights={"next_item": lengths.to(torch.float32)},
        keys=torch.arange(samples),
    )


def measure(
    samples: int, median: int, longest: int, ranks: int, repetitions: int
) -> dict[str, Any]:
    batch = make_batch(samples, median, longest)
    to = np.random.default_rng(1).integers(0, ranks, samples)
    order, counts = np.argsort(to, kind="stable"), np.bincount(to, minlength=ranks).tolist()
    packing, unpacking = [], []
    for _ in range(repetitions + 1):
        begin = time.perf_counter()
        message, sizes, _ = pack(batch, order, counts)
        middle = time.perf_counter()
        back = unpack(batch, message, sizes)
        unpacking.append(1e3 * (time.perf_counter() - middle))
        packing.append(1e3 * (middle - begin))
    expected = batch.select(torch.from_numpy(order))
    assert all(
        torch.equal(a, b) for a, b in zip(back.tensors(), expected.tensors(), strict=True)
    ), "unpacked is what was packed"
    row = {
        "samples": samples,
        "median_length": median,
        "maximum_length": longest,
        "ranks": ranks,
        "bytes": message.numel(),
    }
    return row | {"pack_ms": spread(packing[1:]), "unpack_ms": spread(unpacking[1:])}


def bench_packing(repetitions: int, to: Destination) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        rows.append(measure(*shape, repetitions))
        times = [f"{name} {rows[-1][name]['median']:.2f}" for name in ("pack_ms", "unpack_ms")]
        print(shape, f"{rows[-1]['bytes'] / 1e6:.1f} MB", *times, flush=True)
    command = f"freescale bench packing --repetitions {repetitions}"
    write("packing", "cpu", command, rows, [], to=to)
