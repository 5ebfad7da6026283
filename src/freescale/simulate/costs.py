"""Computes the seconds and bytes of everything that a step does, from the calibration, the network
and the requests of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.embedding.collision import count_pieces
from freescale.pipeline.dense.buckets import compute_bucket_limit
from freescale.simulate.compute import Calibration, Model
from freescale.simulate.curves import Load
from freescale.simulate.network import Network
from freescale.simulate.workload import Demand, PooledDemand, Rows

# numbers that a rank tells before a step (pipeline/agreement.py), and three more for each sample
# with balancing
_COUNTS = 22
_ID_BYTES = 4

# bytes sent, bytes received, seconds: each [ranks]
Message = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class Batch:
    """One step's batch, where it is computed."""

    load: Load
    demand: Demand
    moved_out: NDArray[Any]  # [ranks] bytes that leave, and come, by balancing
    moved_in: NDArray[Any]
    longest: int
    predicted_imbalance: float | None
    moved_tokens: int

    @property
    def lookups(self) -> NDArray[Any]:
        """[ranks] ids that a rank reads, before deduplication."""
        return self.load.tokens if self.demand.lookups is None else self.demand.lookups

    @property
    def rows_read(self) -> NDArray[Any]:
        """[ranks] rows that the model of a rank reads: of tokens, and of pooled features what it
        pools, or bags that owners have pooled."""
        demand = self.demand
        if demand.pooled_here is not None:
            return np.asarray(self.load.tokens + demand.pooled_here)
        return self.load.tokens + (demand.pooled.bags if demand.pooled is not None else 0.0)


class Costs:
    """Seconds of work ([ranks]) and messages of a step.

    Args:
        model: The model.
        calibration: The compute curve.
        network: The network.
        world: Number of ranks.
        transport: What carries the exchanges, `collective` or `hostwire`.
        samples: Of a rank, in the mean.
        jitter: Standard deviation of a rank's compute; None takes the calibration's.
        replicated_rows: Rows of the tables that every rank holds.
    """

    def __init__(
        self,
        model: Model,
        calibration: Calibration,
        network: Network,
        world: int,
        transport: str,
        samples: int,
        jitter: float | None = None,
        replicated_rows: int = 0,
    ) -> None:
        network.check_ranks(world)
        self.model = model
        self.calibration = calibration
        self.network = network
        self.world = world
        self.transport = transport
        self.shape = calibration.find_shape(model)
        self._samples, self._device = samples, torch.device(network.device)
        self._jitter = calibration.jitter if jitter is None else jitter
        self._random = np.random.default_rng(0)
        if transport not in calibration.slowdown:
            known = ", ".join(calibration.slowdown)
            raise ValueError(
                f"calibration {calibration.name!r} has no slowdown of compute beside "
                f"{transport!r}; it knows {known}"
            )
        self.slowdown = calibration.slowdown[transport]
        # what is summed goes over the process group
        self.dense_slowdown = calibration.slowdown["collective"]
        self.every_step = calibration.every_step
        self.optimizer = (
            calibration.optimizer_per_parameter * model.parameters + calibration.optimizer_constant
        )
        self._replicated_rows = replicated_rows
        # planning runs on the host beside the device: what is measured of it is below 0.3 ms
        self.plan = 0.0

    # ---- a rank's own work, [ranks] seconds

    def forward(self, batch: Batch) -> NDArray[Any]:
        read = self.calibration.rows.read_per_byte * self.model.row_bytes * batch.rows_read
        return self._vary(
            self.model.layers * self.shape.forward(batch.load)
            + self.shape.head_forward(batch.load)
            + read
        )

    def backward(self, batch: Batch) -> NDArray[Any]:
        read = self.calibration.rows.read_backward_per_byte * self.model.row_bytes * batch.rows_read
        return self._vary(
            self.model.layers * self.shape.backward(batch.load)
            + self.shape.head_backward(batch.load)
            + read
        )

    def _vary(self, seconds: NDArray[Any]) -> NDArray[Any]:
        if not self._jitter:
            return seconds
        return seconds * np.maximum(
            1 + self._jitter * self._random.standard_normal(self.world), 0.0
        )

    def deduplicate(self, batch: Batch) -> NDArray[Any]:
        return (
            self.calibration.rows.deduplicate_per_key * batch.lookups
            + self.calibration.rows.constant
        )

    def compare(self, current: Batch, following: Batch) -> NDArray[Any]:
        keys = current.demand.whole.owned + following.demand.whole.owned
        rows = self.calibration.rows
        return np.asarray(rows.compare_per_key * keys + rows.constant)

    def lookup(self, rows: Rows) -> NDArray[Any]:
        return (
            self.calibration.rows.lookup_per_byte * self.model.row_bytes * rows.owned
            + self.calibration.rows.constant
        )

    def update(self, rows: Rows) -> NDArray[Any]:
        return (
            self.calibration.rows.update_per_byte * self.model.row_bytes * rows.owned
            + self.calibration.rows.constant
        )

    def make_resident(self, missed: NDArray[Any], row_bytes: int) -> NDArray[Any]:
        """`missed` [ranks]: rows that a rank brings into its cache, with the state of the
        optimizer; as many make room, and go to the host before."""
        size = missed * row_bytes
        link = self.network.pcie
        return np.asarray(2 * (link.time_transfer(size) + np.where(size > 0, link.latency, 0.0)))

    def update_replicated(self, batch: Batch) -> NDArray[Any]:
        """Every rank updates all rows that any rank read: at most whole tables."""
        rows = min(float(batch.demand.whole.requested.sum()), float(self._replicated_rows))
        return np.full(
            self.world,
            self.calibration.rows.update_per_byte * self.model.row_bytes * rows
            + self.calibration.rows.constant,
        )

    def pieces(self, batch: Batch) -> int:
        ranks = len(batch.demand.whole.requested)
        return count_pieces(
            int(batch.demand.whole.requested.mean() * self.model.row_bytes), self._device, ranks
        )

    # ---- messages

    def counts(self, balanced: bool) -> tuple[str, NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The AllGather by which ranks agree on a step, on the host."""
        size = 8.0 * (_COUNTS + (3 * self._samples if balanced else 0))
        sent = np.full(self.world, size * (self.world - 1))
        return (
            "counts",
            sent,
            sent,
            np.full(self.world, self.network.time_all_gather(size, self.world, self._host)),
        )

    def ids(self, batch: Batch) -> list[Message]:
        """Sizes, then ids: from the requesters to the owners."""
        numbers = np.full(self.world, 16.0 * self.world)
        return [
            self._time_exchange(numbers, numbers),
            self._time_to_owners(batch.demand.whole, _ID_BYTES),
        ]

    def marks(self, current: Batch, following: Batch) -> Message:
        """A byte for each request of both batches, from the owners to the requesters."""
        now, then = current.demand.whole, following.demand.whole
        return self._time_exchange(now.owned + then.owned, now.requested + then.requested)

    def rows(self, rows: Rows, pieces: int = 1) -> Message:
        width = self.model.sent_row_bytes
        return self._time_exchange(rows.owned * width, rows.requested * width, pieces)

    def gradients(self, rows: Rows, pieces: int = 1) -> Message:
        return self._time_to_owners(rows, self.model.sent_row_bytes, pieces)

    # ---- pooled features where owners pool: TorchRec's row-wise tables

    def pooled_ids(self, pooled: PooledDemand) -> Message:
        ids = Rows.spread(pooled.ids)
        return self._time_to_owners(ids, _ID_BYTES)

    def pool(self, pooled: PooledDemand) -> NDArray[Any]:
        return self.lookup(Rows.spread(pooled.ids))

    def update_pooled(self, pooled: PooledDemand) -> NDArray[Any]:
        return self.update(Rows.spread(pooled.ids))

    def bags(self, pooled: PooledDemand) -> Message:
        """Every owner has a sum for every bag of every rank; their gradients go the same way
        back."""
        width = self.model.sent_row_bytes
        sent = np.full(self.world, pooled.bags.sum() * width)
        return self._time_exchange(sent, pooled.bags * self.world * width)

    def sample_sizes(self) -> Message:
        numbers = np.full(self.world, 80.0 * self.world)
        return self._time_exchange(numbers, numbers, transport=self._host)

    def samples(self, batch: Batch) -> Message:
        return self._time_exchange(batch.moved_out, batch.moved_in, transport=self._host, own=False)

    def dense(self) -> list[Message]:
        """The losses, then the gradients in buckets: an AllReduce each."""
        size = 4.0 * self.model.parameters
        buckets = max(1, int(-(-size // compute_bucket_limit(int(size)))))
        return [
            self._time_reduction(0.0),
            *(self._time_reduction(size / buckets) for _ in range(buckets)),
        ]

    def _time_reduction(self, size: float) -> Message:
        sent = np.full(self.world, 2 * size * (self.world - 1) / self.world)
        return sent, sent, np.full(self.world, self.network.time_all_reduce(size, self.world))

    def replicated(self) -> Message:
        """Gradients of replicated tables, and the marks of the rows that were read: one
        AllReduce."""
        return self._time_reduction(self._replicated_rows * (self.model.row_bytes + 4.0))

    def _time_to_owners(self, rows: Rows, width: int, pieces: int = 1) -> Message:
        return self._time_exchange(rows.requested * width, rows.owned * width, pieces)

    def _time_exchange(
        self,
        sent: NDArray[Any],
        received: NDArray[Any],
        pieces: int = 1,
        transport: str | None = None,
        own: bool = True,
    ) -> Message:
        """`own`: a part of it stays on the rank. Pieces follow each other closely: only what each
        peer costs comes again."""
        share = 1.0 if own else self.world / max(1, self.world - 1)
        moved = self.network.split_exchange(sent * share, received * share)
        seconds = self.network.time_all_to_all(moved, transport or self.transport)
        again = (pieces - 1) * (self.world - 1) * self.network.per_peer_us * 1e-6
        return moved.sent, moved.received, seconds + again

    @property
    def _host(self) -> str:
        """The transport of messages that are on the host already. They cross no PCIe, but the
        slower path of the two is close enough for some kilobytes."""
        return "hostwire" if self._device.type == "cuda" else "collective"
