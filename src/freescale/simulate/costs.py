"""Computes the seconds and bytes of each part of a step, from the calibration, the network and the
requests of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.embedding.collision import count_pieces
from freescale.pipeline.dense.buckets import compute_bucket_limit
from freescale.simulate.compute import Calibration, Curve, Load, Model
from freescale.simulate.network import Network
from freescale.simulate.ranks import Message
from freescale.simulate.workload import Demand, PooledDemand, Rows

# numbers that ranks agree on before a step (pipeline/agreement.py); balancing adds three per sample
_COUNTS = 22
_ID_BYTES = 4


@dataclass(frozen=True)
class Batch:
    """One step's batch, after balancing."""

    load: Load
    demand: Demand
    moved_out: NDArray[Any]  # [ranks] bytes that balancing moves away, and below those it brings
    moved_in: NDArray[Any]
    longest: int
    predicted_imbalance: float | None
    moved_tokens: int
    parts: NDArray[Any] | None = None  # [ranks, 2] events whose keys and values leave and come

    @property
    def lookups(self) -> NDArray[Any]:
        """[ranks] ids that each rank reads, before deduplication."""
        return self.load.tokens if self.demand.lookups is None else self.demand.lookups

    @property
    def rows_read(self) -> NDArray[Any]:
        """[ranks] rows that the model of a rank reads: those of tokens, and of pooled features the
        rows that it pools, or the bags that owners have pooled."""
        demand = self.demand
        if demand.pooled_here is not None:
            return np.asarray(self.load.tokens + demand.pooled_here)
        return self.load.tokens + (demand.pooled.bags if demand.pooled is not None else 0.0)


class Costs:
    """Seconds of work ([ranks]) and messages of a step."""

    def __init__(
        self,
        model: Model,
        calibration: Calibration,
        network: Network,
        world: int,
        transport: str,  # transport of the exchanges: collective or hostwire
        samples: int,  # mean per rank
        jitter: float | None = None,  # standard deviation of a rank's compute
        replicated_rows: int = 0,  # rows of the tables that every rank holds
    ) -> None:
        network.check_ranks(world)
        self.model, self.calibration, self.network = model, calibration, network
        self.world, self.transport = world, transport
        self.shape = calibration.find_shape(model)
        self._samples, self._device = samples, torch.device(network.device)
        self._jitter = calibration.jitter if jitter is None else jitter
        self._random = np.random.default_rng(0)
        if transport not in calibration.slowdown:
            known = ", ".join(calibration.slowdown)
            raise ValueError(
                f"calibration {calibration.name!r} has no slowdown of compute alongside "
                f"{transport!r}; it knows {known}"
            )
        self.slowdown = calibration.slowdown[transport]
        # sums go over the process group
        self.dense_slowdown = calibration.slowdown["collective"]
        self.every_step = calibration.every_step
        self.optimizer = (
            calibration.optimizer_per_parameter * model.parameters + calibration.optimizer_constant
        )
        self._replicated_rows = replicated_rows

    # ---- a rank's own work, [ranks] seconds

    def forward(self, batch: Batch) -> NDArray[Any]:
        shape, per_byte = self.shape, self.calibration.rows.read_per_byte
        return self._run_model(shape.forward, shape.head_forward, per_byte, batch)

    def backward(self, batch: Batch) -> NDArray[Any]:
        shape, per_byte = self.shape, self.calibration.rows.read_backward_per_byte
        return self._run_model(shape.backward, shape.head_backward, per_byte, batch)

    def _run_model(
        self, layer: Curve, head: Curve, read_per_byte: float, batch: Batch
    ) -> NDArray[Any]:
        read = read_per_byte * self.model.row_bytes * batch.rows_read
        layers = self.model.layers * layer(batch.load.with_prefix(self.model.prefix))
        seconds: NDArray[Any] = layers + head(batch.load) + read
        if not self._jitter:
            return seconds
        drawn = self._random.standard_normal(self.world)
        return np.asarray(seconds * np.maximum(1 + self._jitter * drawn, 0.0))

    def deduplicate(self, batch: Batch) -> NDArray[Any]:
        rows = self.calibration.rows
        return np.asarray(rows.deduplicate_per_key * batch.lookups + rows.constant)

    def compare(self, current: Batch, following: Batch) -> NDArray[Any]:
        keys = current.demand.whole.owned + following.demand.whole.owned
        rows = self.calibration.rows
        return np.asarray(rows.compare_per_key * keys + rows.constant)

    def lookup(self, rows: Rows) -> NDArray[Any]:
        return np.asarray(self._access_rows(self.calibration.rows.lookup_per_byte, rows.owned))

    def update(self, rows: Rows) -> NDArray[Any]:
        return np.asarray(self._access_rows(self.calibration.rows.update_per_byte, rows.owned))

    def _access_rows(self, per_byte: float, count: Any) -> Any:
        return per_byte * self.model.row_bytes * count + self.calibration.rows.constant

    def make_resident(self, missed: NDArray[Any], row_bytes: int) -> NDArray[Any]:
        """`missed` [ranks]: rows that a rank brings into its cache, with their optimizer state; as
        many are evicted to the host first."""
        size = missed * row_bytes
        link = self.network.pcie
        return np.asarray(2 * (link.time_transfer(size) + np.where(size > 0, link.latency, 0.0)))

    def update_replicated(self, batch: Batch) -> NDArray[Any]:
        """Every rank updates all rows that any rank read: at most whole tables."""
        rows = min(float(batch.demand.whole.requested.sum()), float(self._replicated_rows))
        seconds = self._access_rows(self.calibration.rows.update_per_byte, rows)
        return np.full(self.world, seconds)

    def pieces(self, batch: Batch) -> int:
        requested = batch.demand.whole.requested
        size = int(requested.mean() * self.model.row_bytes)
        return count_pieces(size, self._device, len(requested))

    # ---- messages

    def counts(self, balanced: bool) -> Message:
        """The AllGather by which ranks agree on a step, on the host."""
        size = 8.0 * (_COUNTS + (3 * self._samples if balanced else 0))
        sent = np.full(self.world, size * (self.world - 1))
        seconds = self.network.time_all_gather(size, self.world, self._host)
        return Message(sent, sent, np.full(self.world, seconds))

    def ids(self, batch: Batch) -> list[Message]:
        """Sizes, then ids: from the requesters to the owners; then those of features that owners
        pool."""
        numbers, pooled = np.full(self.world, 16.0 * self.world), batch.demand.pooled
        requests = [batch.demand.whole, *([] if pooled is None else [pooled.by_owner])]
        return [
            self._time_exchange(numbers, numbers),
            *(self._time_to_owners(rows, _ID_BYTES) for rows in requests),
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

    def keys_and_values(self, parts: NDArray[Any]) -> Message:
        """An exchange of divided histories in each layer. Nothing hides it."""
        size = 2 * self.model.width * (2 if self.model.precision == "bf16" else 4)
        sent, received = (parts * float(size * self.model.layers)).T
        return self._time_exchange(sent, received, self.model.layers)

    def dense(self) -> list[Message]:
        """The losses, then the gradients in buckets: an AllReduce each."""
        size = 4.0 * self.model.parameters
        buckets = max(1, int(-(-size // compute_bucket_limit(int(size)))))
        return [self._time_reduction(part) for part in (0.0, *[size / buckets] * buckets)]

    def _time_reduction(self, size: float) -> Message:
        sent = np.full(self.world, 2 * size * (self.world - 1) / self.world)
        seconds = self.network.time_all_reduce(size, self.world)
        return Message(sent, sent, np.full(self.world, seconds))

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
        """`own`: a part of it stays on the rank. Pieces follow each other closely: only the cost
        per peer recurs."""
        share = 1.0 if own else self.world / max(1, self.world - 1)
        moved = self.network.split_exchange(sent * share, received * share)
        seconds = self.network.time_all_to_all(moved, transport or self.transport)
        again = (pieces - 1) * (self.world - 1) * self.network.per_peer_us * 1e-6
        return Message(moved.sent, moved.received, seconds + again)

    @property
    def _host(self) -> str:
        """The transport of messages on the host. They do not cross PCIe, but the slower path is
        close enough for a few kilobytes."""
        return "hostwire" if self._device.type == "cuda" else "collective"
