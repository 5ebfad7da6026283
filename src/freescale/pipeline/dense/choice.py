"""Which sum of dense gradients is faster here, the process group's or the partitioned one: timed
before step 1 on the run's own buffers, decided from the slowest rank, the same on all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.pipeline.dense.partitioned import PartitionedAllReduce
from freescale.transport.api import Transport, gather_json

_WARM_UP, _TIMED = 2, 5  # rounds: connections and memory are made in the first
# that partitioned sums must gain: less than this is noise, and the process group needs no thread
_LEAST_GAIN = 0.05


@dataclass(frozen=True)
class DenseSums:
    kind: str  # collective or partitioned
    reason: str


def choose_dense_sums(seconds: Sequence[Mapping[str, float]]) -> DenseSums:
    """Chooses by time. A pure function.

    Args:
        seconds: of every rank: how long it took to sum all buffers, for `collective` and
            `partitioned`. The slowest rank's time counts: all wait for it.
    """
    slowest = {kind: max(rank[kind] for rank in seconds) for kind in ("collective", "partitioned")}
    faster = slowest["partitioned"] < (1 - _LEAST_GAIN) * slowest["collective"]
    figures = (
        f"measured {1e3 * slowest['collective']:.2f} ms by the process group, "
        f"{1e3 * slowest['partitioned']:.2f} ms partitioned"
    )
    return DenseSums("partitioned" if faster else "collective", figures)


def measure_dense_sums(
    transport: Transport, partitioned: PartitionedAllReduce, buffers: Sequence[Tensor]
) -> list[dict[str, float]]:
    """Times both sums, in turn, on buffers of zeros, which stay zeros. A collective.

    Returns:
        [world], of every rank: the median of the rounds, in seconds, by kind.
    """
    ways: dict[str, Transport | PartitionedAllReduce] = {
        "collective": transport,
        "partitioned": partitioned,
    }
    found: dict[str, list[float]] = {kind: [] for kind in ways}
    for _ in range(_WARM_UP + _TIMED):
        for kind, sums in ways.items():
            _wait_idle(transport.device)
            transport.gather_bytes(b"")  # the ranks begin together
            begin = time.perf_counter()
            for handle in [sums.all_reduce(buffer, "dense") for buffer in buffers]:
                handle.wait()
            _wait_idle(transport.device)
            found[kind].append(time.perf_counter() - begin)
    medians = {kind: statistics.median(times[_WARM_UP:]) for kind, times in found.items()}
    return gather_json(transport, medians)


def _wait_idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
