"""What a run decides by itself if its options say `auto`: the precision, from the device, and
the sum of dense gradients, the process group's or the partitioned one, from a measurement before
step 1 on the run's own buffers. Chosen once, and kept in checkpoints: a run that
resumes repeats what was chosen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from freescale.pipeline.dense.buckets import GradientBuckets
from freescale.pipeline.dense.partitioned import PartitionedAllReduce
from freescale.pipeline.dense.reducer import Reducer
from freescale.pipeline.precision import choose_precision, supports_bf16
from freescale.transport.api import Transport, gather_json

_REPEATED = "as in the checkpoint"
_WARM_UP, _TIMED = 2, 5  # rounds: connections and memory are made in the first
# that partitioned sums must gain: less than this is noise, and the process group needs no thread
_LEAST_GAIN = 0.05


class Choices:
    """Of one schedule. `tune` completes them."""

    def __init__(
        self,
        transport: Transport,
        parameters: Iterable[nn.Parameter],
        reducer: Reducer,
        precision: str,
        dense_sums: str,
    ) -> None:
        """`parameters` are the dense ones, `reducer` sums their gradients. A collective, where
        partitioned sums are requested."""
        self._transport, self._reducer = transport, reducer
        device = transport.device
        float32 = all(parameter.dtype == torch.float32 for parameter in parameters)
        self._automatic_precision = precision == "auto"
        self.precision, self._reason = choose_precision(
            precision, device.type, supports_bf16(device), float32
        )
        self.dense_sums: DenseSums | None = None  # not known yet
        self.partitioned: PartitionedAllReduce | None = None  # where it sums
        if dense_sums != "auto":
            self._adopt(DenseSums(dense_sums, "as requested"))

    def tune(self) -> None:
        """Measures what is not known yet. A collective. With one rank there is nothing to sum."""
        transport, reducer = self._transport, self._reducer
        if self.dense_sums is not None or transport.world == 1:
            return
        if not transport.sums_apart or not reducer.flat:
            self.dense_sums = DenseSums("collective", "exchanges go through the process group, too")
        else:
            opened = self._open_partitioned()
            seconds = measure_dense_sums(transport, opened, reducer.flat)
            opened.rest()  # training may begin later
            self._adopt(choose_dense_sums(seconds), opened)

    def _adopt(self, chosen: DenseSums, opened: PartitionedAllReduce | None = None) -> None:
        self.dense_sums = chosen
        if chosen.kind == "partitioned" and self._transport.world > 1:
            assert isinstance(self._reducer, GradientBuckets)
            self.partitioned = opened or self._open_partitioned()
            self._reducer.summing = self.partitioned
        elif opened is not None:
            opened.close()

    def _open_partitioned(self) -> PartitionedAllReduce:
        """A collective. On a CPU, one bucket leaves when nothing is left to compute: no lane."""
        several = len(self._reducer.flat) > 1
        return PartitionedAllReduce(
            self._transport, lane=several or self._transport.device.type != "cpu"
        )

    def describe(self) -> list[str]:
        """A line for each, with its reason."""
        lines = [f"precision {self.precision} ({self._reason})"]
        if self.dense_sums is not None and self._transport.world > 1:
            kind, reason = self.dense_sums.kind, self.dense_sums.reason
            lines.append(f"dense sums {kind} ({reason})")
        return lines

    def state_dict(self) -> dict[str, str]:
        sums = {} if self.dense_sums is None else {"dense_sums": self.dense_sums.kind}
        return {"precision": self.precision, **sums}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Repeats the choices of an earlier run if this one has `auto`. A collective."""
        if self._automatic_precision and "precision" in state:
            requested = state["precision"]
            device = self._transport.device
            self.precision, _ = choose_precision(requested, device.type, supports_bf16(device))
            self._reason = _REPEATED
        # one rank sums nothing, and passes on what several may need again
        if self.dense_sums is None and "dense_sums" in state:
            self._adopt(DenseSums(state["dense_sums"], _REPEATED))

    def rest(self) -> None:
        """Between runs: no thread is left."""
        if self.partitioned is not None:
            self.partitioned.rest()

    def close(self) -> None:
        """Gives channels back. A collective."""
        if self.partitioned is not None:
            self.partitioned.close()


@dataclass(frozen=True)
class DenseSums:
    kind: str  # collective or partitioned
    reason: str


def choose_dense_sums(seconds: Sequence[Mapping[str, float]]) -> DenseSums:
    """Chooses by the seconds that each rank took to sum all buffers, `collective` and
    `partitioned`. The slowest rank's time counts: all wait for it. A pure function."""
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
