"""The schedules, each from top to bottom in the order in which things happen. The originals are
pipeline/serial.py and pipeline/staged.py, with the same names of spans and kinds of collectives.

    serial       counts -> ids -> rows -> forward, backward -> gradients, update -> dense ->
                 optimizer; nothing overlaps
    sparse_dist  TorchRec's TrainPipelineSparseDist: the ids of batch i+1 are exchanged while batch
                 i computes, and the dense gradients are summed in buckets during the backward;
                 rows and their gradients block. Owners pool the rows of pooled features and send
                 sums; in the other schedules requesters do
    stale        everything of batch i+1 is fetched while batch i computes: rows that both read are
                 a step old (a control)
    staged       the same, except for the rows that both read, which are fetched after i's update:
                 no row is stale. Its stages have the numbers of pipeline/staged.py.

Tables that the rule of embedding/placement.py replicates have no ids or rows to exchange, whatever
the schedule: one AllReduce of them after backward.

Rows at home in host memory are made resident by their owners: between stages 2 and 3 in `staged`
and `stale`, blocking in the others.

With balancing, the samples of the next batch change ranks in three stages (balance/shuffle.py): at
three junctures of a step, in `stale` and `staged` in the lane `input`, where the ranks agree on a
batch too.
"""

from __future__ import annotations

import numpy as np

from freescale.simulate.costs import Batch, Costs
from freescale.simulate.placed_tables import ITEM, PlacedTables
from freescale.simulate.ranks import AHEAD, INPUT, MAIN, URGENT, Meeting, Message, Ranks, Step
from freescale.simulate.workload import Rows

# Seconds of planning: it runs on the host alongside the device, and takes less than 0.3 ms.
_PLAN = 0.0
SCHEDULES = ("serial", "sparse_dist", "stale", "staged")


class SimulatedSchedule:
    """Runs one step at a time, given the batches before, of and after it; None if missing."""

    def __init__(
        self, ranks: Ranks, costs: Costs, schedule: str, balanced: bool, tables: PlacedTables
    ) -> None:
        self.ranks, self.costs, self.balanced = ranks, costs, balanced and costs.world > 1
        self._tables = tables
        # balancing's third stage, of the next batch to complete
        self._samples: Meeting | None = None
        self._overlaps = schedule != "serial"  # the dense gradients leave during the backward
        self._dense: list[Meeting] = []
        self._run = {
            "serial": self._run_serial,
            "sparse_dist": self._run_sparse_dist,
            "stale": self._run_staged,
            "staged": self._run_staged,
        }[schedule]

    def run(
        self, number: int, previous: Batch | None, current: Batch, following: Batch | None
    ) -> Step:
        self.ranks.begin_step(number)
        self._run(previous, current, following)
        return self.ranks.end_step()

    # ---- schedules

    def _run_serial(self, previous: Batch | None, current: Batch, following: Batch | None) -> None:
        self._complete(current)
        self._request_ids(current, MAIN)
        self._fetch_rows(current)
        self._compute(current, following)
        self._return_gradients(current)
        self._sum_replicated(current)
        self._update_dense()

    def _run_sparse_dist(
        self, previous: Batch | None, current: Batch, following: Batch | None
    ) -> None:
        self._complete(current, agrees=self.balanced)  # TorchRec's ranks agree on nothing
        if previous is None:
            self._request_ids(current, MAIN)
        else:
            self.ranks.arrive()
        self._fetch_rows(current)
        self.ranks.submit(AHEAD)
        if following is not None:
            self._request_ids(following, AHEAD)
        self._compute(current, following)
        self._return_gradients(current)
        self._sum_replicated(current)
        self._update_dense()

    def _run_staged(self, previous: Batch | None, current: Batch, following: Batch | None) -> None:
        ranks, costs = self.ranks, self.costs
        if previous is None:  # the first batch: everything, blocking
            self._complete(current)
            self._request_ids(current, MAIN)
            self._fetch_rows(current)
            if following is not None:
                self._complete(following)
        else:
            ranks.work("data", costs.every_step)
            ranks.arrive()
        # lane `ahead`, while the current batch computes
        ranks.submit(AHEAD)
        if following is not None:
            self._request_ids(following, AHEAD)  # 1
            self._compare(current, following)  # 2
        compared = ranks.now[AHEAD]
        if following is not None:
            self._make_resident(following, AHEAD)
        if previous is not None:
            self._push_gradients(previous.demand.deferred, AHEAD, costs.pieces(previous))  # 3
        if following is not None:
            self._pull_rows(following.demand.early, AHEAD, costs.pieces(following))  # 4
        # lane `input`: the batch after next, for which `following` stands in
        ranks.submit(INPUT)
        if following is not None:
            self._prepare(following)
        self._exchange_parts(current)
        ranks.compute("forward", costs.forward(current))
        self._backward(current)
        # lane `urgent`, after the backward
        ranks.submit(URGENT)
        ranks.now[URGENT] = np.maximum(ranks.now[URGENT], compared)
        if following is not None:
            self._push_gradients(current.demand.urgent, URGENT)  # 5
            self._pull_rows(following.demand.late, URGENT)  # 6
        self._sum_replicated(current)
        self._update_dense()
        ranks.arrive("await batch", [INPUT])

    # ---- verbs

    def _complete(self, batch: Batch, agrees: bool = True) -> None:
        """The batch is complete: ranks have agreed on it, and balanced samples have arrived."""
        self.ranks.work("data", self.costs.every_step)
        if self.balanced and self._samples is not None:
            self.ranks.wait(self._samples)
            self._samples = None
        elif agrees:
            self.ranks.meet("counts", "host", self.costs.counts(self.balanced))

    def _prepare(self, batch: Batch) -> None:
        """Like `_complete`, in the lane `input`."""
        ranks, costs = self.ranks, self.costs
        ranks.tell("counts", "host", costs.counts(self.balanced), INPUT)
        if self.balanced:
            ranks.work("balance", _PLAN, INPUT)
            ranks.tell("samples", "host", costs.sample_sizes(), INPUT)
            ranks.tell("samples", "host", costs.samples(batch), INPUT)

    def _request_ids(self, batch: Batch, lane: str) -> None:
        """Deduplicate, AllToAll of sizes and of ids."""
        self.ranks.work("deduplicate", self.costs.deduplicate(batch), lane)
        if not self._tables.sharded:
            return
        for message in self.costs.ids(batch):
            self._exchange("ids", message, lane)

    def _compare(self, current: Batch, following: Batch) -> None:
        if not self._tables.sharded:
            return
        self.ranks.work("compare", self.costs.compare(current, following), AHEAD)
        self._exchange("ids", self.costs.marks(current, following), AHEAD)

    def _make_resident(self, batch: Batch, lane: str) -> None:
        """Owners of rows in host memory write back evicted rows and bring missing ones."""
        if self._tables.missed is not None:
            missed = self._tables.count_missed(batch.demand.whole.owned)
            seconds = self.costs.make_resident(missed, self._tables.row_bytes[ITEM])
            self.ranks.work("make resident", seconds, lane, on_device=False)

    def _fetch_rows(self, batch: Batch) -> None:
        """All rows of the batch, blocking."""
        if not self._tables.sharded:
            return
        self._make_resident(batch, MAIN)
        self._pull_rows(batch.demand.whole, MAIN)
        if batch.demand.pooled is not None:
            self.ranks.work("lookup", self.costs.lookup(batch.demand.pooled.by_owner))
            self._exchange("rows", self.costs.bags(batch.demand.pooled), MAIN)

    def _return_gradients(self, batch: Batch) -> None:
        """All gradients of the batch, blocking."""
        if not self._tables.sharded:
            return
        self._push_gradients(batch.demand.whole, MAIN)
        if batch.demand.pooled is not None:
            self._exchange("gradients", self.costs.bags(batch.demand.pooled), MAIN)
            self.ranks.work("update rows", self.costs.update(batch.demand.pooled.by_owner))

    def _pull_rows(self, rows: Rows, lane: str, pieces: int = 1) -> None:
        """Rows to their requesters."""
        if self._tables.sharded:
            self.ranks.work("lookup", self.costs.lookup(rows), lane, 1 / pieces)
            self._exchange("rows", self.costs.rows(rows, pieces), lane)

    def _push_gradients(self, rows: Rows, lane: str, pieces: int = 1) -> None:
        """Gradients of rows to their owners, who update them."""
        if self._tables.sharded:
            self._exchange("gradients", self.costs.gradients(rows, pieces), lane)
            self.ranks.work("update rows", self.costs.update(rows), lane, 1 / pieces)

    def _sum_replicated(self, batch: Batch) -> None:
        """Gradients of the tables that every rank holds."""
        if self._tables.replicated_rows:
            self.ranks.meet("gradients", "collective", self.costs.replicated())
            self.ranks.work("update rows", self.costs.update_replicated(batch))

    def _compute(self, batch: Batch, following: Batch | None) -> None:
        """Forward and backward, with the junctures of balancing around and between them."""
        ranks, costs = self.ranks, self.costs
        agreed = sizes = None
        if self.balanced:
            agreed = ranks.issue("counts", "host", costs.counts(True))
        self._exchange_parts(batch)
        ranks.compute("forward", costs.forward(batch))
        if self.balanced:
            ranks.wait(agreed)
            ranks.work("balance", _PLAN)
            sizes = ranks.issue("samples", "host", costs.sample_sizes())
        self._backward(batch)
        if self.balanced:
            ranks.wait(sizes)
            # The samples of the next batch, of about the same size.
            self._samples = ranks.issue("samples", "host", costs.samples(following or batch))

    def _backward(self, batch: Batch) -> None:
        """In as many equal parts as there are buckets; each leaves when its part is done."""
        ranks, costs = self.ranks, self.costs
        self._exchange_parts(batch)
        if not self._overlaps:
            ranks.compute("backward", costs.backward(batch))
            return
        messages, slowdown = costs.dense(), costs.dense_slowdown
        for number, message in enumerate(messages):
            if number:
                ranks.compute("backward", costs.backward(batch) / (len(messages) - 1))
            after = self._dense[-1] if self._dense else None
            sent = ranks.send("dense", "collective", message, after=after, slowdown=slowdown)
            self._dense.append(sent)

    def _update_dense(self) -> None:
        for meeting in self._dense:
            self.ranks.wait(meeting)
        if not self._overlaps:
            for message in self.costs.dense():
                self.ranks.meet("dense", "collective", message)
        self._dense = []
        self.ranks.work("optimizer", self.costs.optimizer)

    def _exchange_parts(self, batch: Batch) -> None:
        """Keys and values of divided histories, or their gradients."""
        if batch.parts is not None:
            self._exchange("attention", self.costs.keys_and_values(batch.parts), MAIN)

    def _exchange(self, kind: str, message: Message, lane: str) -> None:
        """An AllToAll over the transport. In a lane it slows concurrent compute down."""
        transport = self.costs.transport
        slowdown = self.costs.slowdown if lane != MAIN else 1.0
        overtakes = lane == URGENT and transport == "hostwire"
        self.ranks.meet(kind, transport, message, lane, slowdown=slowdown, overtakes=overtakes)
