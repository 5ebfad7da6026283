"""A simulated run: batches from a source, assigned by the partitioners of training, through a
schedule, step by step.

Memory is bounded: of the ids of three batches are held, of the steps none (each is handed to
whoever asked).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import find_partitioner
from freescale.balance.problem import Assignment
from freescale.embedding.layout import TableSpec
from freescale.embedding.placement import CHOICES, Placement, choose_placement
from freescale.simulate.compute import Calibration, Load, Model
from freescale.simulate.costs import Batch, Costs
from freescale.simulate.network import TRANSPORTS, Network
from freescale.simulate.ranks import Ranks, Step
from freescale.simulate.schedules import SCHEDULES, SimulatedSchedule
from freescale.simulate.workload import Demand, Rows, Workload

_STATE_BYTES = 4  # of a row: row-wise Adagrad


@dataclass(frozen=True)
class Setting:
    """One configuration of a run."""

    schedule: str = "serial"
    balance: str = "none"
    transport: str = "collective"
    adapt: bool = False  # the balancer's cost model learns from the simulated times
    placement: str = "auto"  # of the table: by the rule of training, or one of its CHOICES
    # without it, every event of a history is a request, as in plain TorchRec
    deduplicate: bool = True

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.placement not in ("auto", *CHOICES):
            raise ValueError(
                f"placement {self.placement!r} is not one of auto, {', '.join(CHOICES)}"
            )
        if not self.deduplicate and self.schedule in ("stale", "staged"):
            raise ValueError(
                f"schedule {self.schedule!r} needs requests without duplicates; "
                "leave deduplication on"
            )

    @property
    def name(self) -> str:
        balance = (
            ""
            if self.balance == "none"
            else f", {self.balance}" + (" adapted" if self.adapt else "")
        )
        return f"{self.schedule}{balance}, {self.transport}" + (
            "" if self.deduplicate else ", not deduplicated"
        )


@dataclass(frozen=True)
class Cluster:
    """What a run happens on."""

    model: Model
    calibration: Calibration
    network: Network
    gpus: int
    # standard deviation of a rank's compute from the curve; None: the calibration's
    jitter: float | None = None


def simulate(
    setting: Setting, cluster: Cluster, source: Workload, steps: int, planned: Sequence[Batch] = ()
) -> Iterator[Step]:
    """The steps of a run; the first one fetches everything blocking, in every schedule. `planned`:
    of `plan`, if it was called."""
    samples = -(-len(source.get_lengths(0)) // cluster.gpus)
    machine = (cluster.model, cluster.calibration, cluster.network, cluster.gpus)
    costs = Costs(*machine, setting.transport, samples, cluster.jitter, source.items)
    ranks = Ranks(cluster.gpus, cluster.network.queue_ms * 1e-3)
    assigned = (
        None
        if planned
        else _AssignedBatches(setting.balance, setting.adapt, cluster, source, steps)
    )
    batches = map(partial(_apply_setting, setting), planned or assigned or ())
    previous: Batch | None = None
    current = next(batches, None)
    replicated = (
        current is not None
        and choose_table_placement(setting, cluster.model, source.items, current).kind
        == "replicated"
    )
    schedule = SimulatedSchedule(
        ranks, costs, setting.schedule, setting.balance != "none", replicated
    )
    number = 0
    while current is not None:
        following = next(batches, None)
        step = schedule.run(number, previous, current, following)
        step.counters = _list_counters(current)
        if assigned is not None:
            assigned.learn(step)
        yield step
        previous, current, number = current, following, number + 1


def choose_table_placement(setting: Setting, model: Model, items: int, first: Batch) -> Placement:
    """Whether the table is sharded, by training's own rule and the first batch."""
    if setting.placement != "auto":
        return Placement(setting.placement, "as asked")
    spec = TableSpec("item", items, model.width, torch.float32, ())
    return choose_placement(spec, _STATE_BYTES, float(first.demand.whole.requested.mean()))


def plan_batches(balance: str, cluster: Cluster, source: Workload, steps: int) -> list[Batch]:
    """The batches of a run, to be used by several: they depend on the partitioner and on nothing
    else of a setting (as long as its cost model does not learn). A few numbers for each rank and
    step."""
    return list(_AssignedBatches(balance, False, cluster, source, steps))


def _apply_setting(setting: Setting, batch: Batch) -> Batch:
    """What the setting makes of a batch's requests."""
    demand = batch.demand
    if setting.schedule == "stale":
        nothing = Rows(np.zeros_like(demand.whole.requested), np.zeros_like(demand.whole.requested))
        demand = Demand(demand.whole, nothing, nothing)
    if not setting.deduplicate:
        demand = Demand(Rows.spread(batch.load.tokens), demand.late, demand.urgent)
    return replace(batch, demand=demand)


class _AssignedBatches:
    """Batches by the partitioners of training, one after another, each compared with its
    neighbours."""

    def __init__(
        self, balance: str, adapt: bool, cluster: Cluster, source: Workload, steps: int
    ) -> None:
        self._balanced, self._adapt = balance != "none", adapt
        self._gpus, self._source, self._steps = cluster.gpus, source, steps
        model, head = cluster.model, cluster.model.width // cluster.model.heads
        cost = CostModel.of_hstu(
            width=model.width, layers=model.layers, heads=model.heads, d_qk=head, d_v=head
        )
        nodes = cluster.network.assign_nodes(cluster.gpus)
        self._balancer = Balancer(find_partitioner(balance), cost, nodes=nodes, adapt=adapt)

    def __iter__(self) -> Iterator[Batch]:
        before = None
        now = self._assign(0)
        for step in range(self._steps):
            after = self._assign(step + 1) if step + 1 < self._steps else None
            demand = self._source.compute_demand(before and before[3], now[3], after and after[3])
            yield self._make_batch(*now[:3], demand)
            if after is not None:
                before, now = now, after

    def _assign(self, step: int) -> tuple[NDArray[Any], NDArray[Any], Assignment, Any]:
        """(lengths [n], ranks that read them [n], their assignment, what the ranks ask for)."""
        lengths, gpus = self._source.get_lengths(step), self._gpus
        home = np.arange(len(lengths)) * gpus // len(lengths)
        table = np.stack([lengths, np.zeros_like(lengths), lengths], axis=1)
        assignment = self._balancer.plan(step, table, home, gpus)
        return lengths, home, assignment, self._source.find_requests(step, assignment.rank_of, gpus)

    def _make_batch(
        self, lengths: NDArray[Any], home: NDArray[Any], assignment: Assignment, demand: Demand
    ) -> Batch:
        moving = assignment.rank_of != home
        out = np.bincount(home[moving], lengths[moving], self._gpus)
        into = np.bincount(assignment.rank_of[moving], lengths[moving], self._gpus)
        load = Load.from_assignment(lengths, assignment.rank_of, self._gpus)
        imbalance = assignment.imbalance if self._balanced else None
        return Batch(
            load, demand, out, into, int(lengths.max(initial=0)), imbalance, assignment.moved_tokens
        )

    def learn(self, step: Step) -> None:
        if self._adapt:
            spans = [
                end - begin for name, begin, end in step.spans if name in ("forward", "backward")
            ]
            self._balancer.learn(step.number, np.sum(spans, axis=0))


def _list_counters(batch: Batch) -> dict[str, NDArray[Any]]:
    """As the ledgers count: sums over ranks, or the largest of them where the name begins with
    max_."""
    counted = {
        "samples": batch.load.samples,
        "tokens": batch.load.tokens,
        "requests": batch.demand.whole.owned,
        "collisions": batch.demand.late.owned,
    }
    ranks = len(batch.load.samples)
    most = {"max_length": float(batch.longest)}
    if batch.predicted_imbalance is not None:
        most |= {
            "max_predicted_imbalance": batch.predicted_imbalance,
            "max_moved_tokens": float(batch.moved_tokens),
        }
    return counted | {name: np.full(ranks, value) for name, value in most.items()}
