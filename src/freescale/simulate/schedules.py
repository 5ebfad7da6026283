"""The schedules, each as its figure reads: top to bottom in the order in which things happen. The
originals are pipeline/serial.py and pipeline/staged.py; the names of spans and the kinds of
collectives are theirs.

    serial     counts -> ids -> rows -> forward, backward -> gradients, update -> dense -> optimizer            nothing overlaps
    metadata   the same, but the ids of batch i+1 are exchanged while batch i computes (TorchRec's SparseDist), and the dense
               gradients are summed in buckets during the backward
    stale      everything of batch i+1 is fetched while batch i computes: rows that both read are a step old (a control)
    staged     the same, except for the rows that both read, which come after i's update: nothing is stale

A table that the rule of embedding/placement.py replicates has no ids or rows to exchange, whatever
the schedule: one AllReduce of the whole table after backward.

With balancing, the samples of the batch after change ranks in three stages (balance/shuffle.py): at
three junctures of a step, in `stale` and `staged` in the lane `coming`, where the ranks agree on a
batch too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from freescale.simulate.costs import Batch, Costs, Message
from freescale.simulate.ranks import AHEAD, COMING, MAIN, URGENT, Meeting, Ranks, Step

SCHEDULES = ("serial", "metadata", "stale", "staged")


class Pipeline:
    """One step at a time: `run(last, now, coming)` are the batches before, of, and after the step;
    None where there is none."""

    def __init__(
        self, ranks: Ranks, costs: Costs, schedule: str, balanced: bool, replicated: bool = False
    ) -> None:
        self.ranks, self.costs, self.balanced = ranks, costs, balanced and costs.world > 1
        # balancing's third stage, of the next batch to complete
        self._samples: Meeting | None = None
        # the dense gradients leave during the backward
        self._overlaps = schedule != "serial" and not replicated
        self._dense: list[Meeting] = []
        named = {
            "serial": self._serial,
            "metadata": self._metadata,
            "stale": self._staged,
            "staged": self._staged,
        }
        self._run: Callable[[Batch | None, Batch, Batch | None], None] = (
            self._replicated if replicated else named[schedule]
        )

    def run(self, number: int, last: Batch | None, now: Batch, coming: Batch | None) -> Step:
        self.ranks.begin_step(number)
        self._run(last, now, coming)
        return self.ranks.end_step()

    # ---- schedules

    def _serial(self, last: Batch | None, now: Batch, coming: Batch | None) -> None:
        self._complete(now)
        self._ask(now, MAIN)
        self._fetch_rows(now)
        self._compute(now, coming)
        self._return_gradients(now)
        self._update_dense()

    def _metadata(self, last: Batch | None, now: Batch, coming: Batch | None) -> None:
        self._complete(now)
        if last is None:
            self._ask(now, MAIN)
        else:
            self.ranks.arrive()
        self._fetch_rows(now)
        self.ranks.submit(AHEAD)
        if coming is not None:
            self._ask(coming, AHEAD)
        self._compute(now, coming)
        self._return_gradients(now)
        self._update_dense()

    def _staged(self, last: Batch | None, now: Batch, coming: Batch | None) -> None:
        ranks = self.ranks
        if last is None:  # the first batch: everything, blocking
            self._complete(now)
            self._ask(now, MAIN)
            self._fetch_rows(now)
            if coming is not None:
                self._complete(coming)
        else:
            ranks.work("data", self.costs.every_step)
            ranks.arrive()
        # lane `ahead`, while batch i computes
        ranks.submit(AHEAD)
        if coming is not None:
            self._ask(coming, AHEAD)  # b
            self._compare(now, coming)  # c
        compared = ranks.now[AHEAD]
        if last is not None:
            self._give(last, AHEAD)  # a
        if coming is not None:
            self._bring(coming, AHEAD)  # d
        # lane `coming`: batch i+2, of which the simulation knows as much as of i+1
        ranks.submit(COMING)
        if coming is not None:
            self._take(coming)
        ranks.compute("forward", self.costs.forward(now))
        self._backward(now)
        # lane `urgent`, after its backward
        ranks.submit(URGENT)
        ranks.now[URGENT] = np.maximum(ranks.now[URGENT], compared)
        if coming is not None:
            self._give(now, URGENT)  # e
            self._bring(coming, URGENT)  # f
        self._update_dense()
        ranks.arrive("await batch", [COMING])

    def _replicated(self, last: Batch | None, now: Batch, coming: Batch | None) -> None:
        self._complete(now)
        self.ranks.work("deduplicate", self.costs.deduplicate(now))
        self._compute(now, coming)
        self.ranks.meet("gradients", "collective", *self.costs.table())
        self.ranks.work("update rows", self.costs.update_table(now))
        self._update_dense()

    # ---- verbs

    def _complete(self, batch: Batch) -> None:
        """The batch is there: ranks have agreed on it and, with balancing, its samples have
        come."""
        self.ranks.work("data", self.costs.every_step)
        if self.balanced and self._samples is not None:
            self.ranks.wait(self._samples)
            self._samples = None
        else:
            self._agree()

    def _agree(self) -> None:
        kind, sent, received, seconds = self.costs.counts(self.balanced)
        self.ranks.meet(kind, "host", sent, received, seconds)

    def _take(self, batch: Batch) -> None:
        """The same, in the lane `coming`."""
        ranks, costs = self.ranks, self.costs
        kind, sent, received, seconds = costs.counts(self.balanced)
        ranks.tell(kind, "host", sent, received, seconds, COMING)
        if self.balanced:
            ranks.work("balance", costs.plan, COMING)
            ranks.tell("samples", "host", *costs.sample_sizes(), lane=COMING)
            ranks.tell("samples", "host", *costs.samples(batch), lane=COMING)

    def _ask(self, batch: Batch, lane: str) -> None:
        """Deduplicate, AllToAll of sizes and of ids."""
        self.ranks.work("deduplicate", self.costs.deduplicate(batch), lane)
        for message in self.costs.ids(batch):
            self._meet("ids", message, lane)

    def _compare(self, now: Batch, coming: Batch) -> None:
        self.ranks.work("compare", self.costs.compare(now, coming), AHEAD)
        self._meet("ids", self.costs.marks(now, coming), AHEAD)

    def _fetch_rows(self, batch: Batch) -> None:
        self.ranks.work("lookup", self.costs.lookup(batch.demand.whole))
        self._meet("rows", self.costs.rows(batch.demand.whole), MAIN)

    def _return_gradients(self, batch: Batch) -> None:
        self._meet("gradients", self.costs.gradients(batch.demand.whole), MAIN)
        self.ranks.work("update rows", self.costs.update(batch.demand.whole))

    def _bring(self, batch: Batch, lane: str) -> None:
        """d or f: rows of the batch to their requesters, in pieces where they are not urgent."""
        part = batch.demand.early if lane == AHEAD else batch.demand.late
        pieces = self.costs.pieces(batch) if lane == AHEAD else 1
        self.ranks.work("lookup", self.costs.lookup(part), lane, 1 / pieces)
        self._meet("rows", self.costs.rows(part, pieces), lane)

    def _give(self, batch: Batch, lane: str) -> None:
        """a or e: gradients of the batch to their owners, who update the rows."""
        part = batch.demand.rest if lane == AHEAD else batch.demand.shared
        pieces = self.costs.pieces(batch) if lane == AHEAD else 1
        self._meet("gradients", self.costs.gradients(part, pieces), lane)
        self.ranks.work("update rows", self.costs.update(part), lane, 1 / pieces)

    def _compute(self, batch: Batch, coming: Batch | None) -> None:
        """Forward and backward, with the junctures of balancing around and between them."""
        ranks, costs = self.ranks, self.costs
        agreed = sizes = None
        if self.balanced:
            kind, *message = costs.counts(True)
            agreed = ranks.issue(kind, "host", *message)
        ranks.compute("forward", costs.forward(batch))
        if self.balanced:
            ranks.wait(agreed)
            ranks.work("balance", costs.plan)
            sizes = ranks.issue("samples", "host", *costs.sample_sizes())
        self._backward(batch)
        if self.balanced:
            ranks.wait(sizes)
            # These are the samples of the batch after: as many, on the mean.
            self._samples = ranks.issue(
                "samples", "host", *costs.samples(coming if coming is not None else batch)
            )

    def _backward(self, batch: Batch) -> None:
        """In as many equal parts as there are buckets; each leaves when its part is done."""
        ranks, costs = self.ranks, self.costs
        if not self._overlaps:
            ranks.compute("backward", costs.backward(batch))
            return
        messages = costs.dense()
        for number, (sent, received, seconds) in enumerate(messages):
            if number:
                ranks.compute("backward", costs.backward(batch) / (len(messages) - 1))
            after = self._dense[-1] if self._dense else None
            slowdown = costs.dense_slowdown
            self._dense.append(
                ranks.send(
                    "dense", "collective", sent, received, seconds, after=after, slowdown=slowdown
                )
            )

    def _update_dense(self) -> None:
        for meeting in self._dense:
            self.ranks.wait(meeting)
        if not self._overlaps:
            for message in self.costs.dense():
                self.ranks.meet("dense", "collective", *message)
        self._dense = []
        self.ranks.work("optimizer", self.costs.optimizer)

    def _meet(self, kind: str, message: Message, lane: str) -> None:
        """An AllToAll over the transport; beside compute it slows that down."""
        costs, (sent, received, seconds) = self.costs, message
        slowdown, overtakes = (
            costs.slowdown if lane != MAIN else 1.0,
            lane == URGENT and costs.transport == "hostwire",
        )
        self.ranks.meet(
            kind,
            costs.transport,
            sent,
            received,
            seconds,
            lane,
            slowdown=slowdown,
            overtakes=overtakes,
        )
