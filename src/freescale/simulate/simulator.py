"""Simulates a run: assigns the batches of a workload by the partitioners of training, and runs a
schedule over them, step by step. Holds the ids of three batches and no steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel, square
from freescale.balance.partitioners.lookup import find_partitioner
from freescale.balance.problem import Assignment
from freescale.embedding.placement import CHOICES
from freescale.simulate.compute import Calibration, Load, Model
from freescale.simulate.costs import Batch, Costs
from freescale.simulate.network import TRANSPORTS, Network
from freescale.simulate.placed_tables import ITEM, PlacedTables, assign_home, place_tables
from freescale.simulate.ranks import Ranks, Step
from freescale.simulate.schedules import SCHEDULES, SimulatedSchedule
from freescale.simulate.workload import Demand, Rows, Workload


@dataclass(frozen=True)
class Setting:
    """One configuration of a run."""

    schedule: str = "serial"
    balance: str = "none"
    transport: str = "collective"
    adapt: bool = False  # the balancer's cost model learns from the simulated times
    placement: str = "auto"  # of the table: by the rule of training, or one of its CHOICES
    deduplicate: bool = True  # False: every event of a history is a request, as in plain TorchRec
    cache_miss: float = 100.0  # of placement `host`: percent of a step's rows

    def __post_init__(self) -> None:
        choices = {
            "schedule": SCHEDULES,
            "transport": TRANSPORTS,
            "placement": ("auto", *CHOICES, "host"),
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
        if not 0 <= self.cache_miss <= 100:
            raise ValueError(f"cache_miss is {self.cache_miss}; it is a percentage")
        if not self.deduplicate and self.schedule in ("stale", "staged"):
            raise ValueError(
                f"schedule {self.schedule!r} needs requests without duplicates; "
                "leave deduplication on"
            )


@dataclass(frozen=True)
class Cluster:
    """The model and the machine of a run."""

    model: Model
    calibration: Calibration
    network: Network
    gpus: int
    # standard deviation of a rank's compute from the curve; None: the calibration's
    jitter: float | None = None
    split_histories: str = "off"


def simulate(
    setting: Setting,
    cluster: Cluster,
    source: Workload,
    steps: int,
    planned: Sequence[Batch] = (),
    tables: PlacedTables | None = None,
) -> Iterator[Step]:
    """Simulates a run; in every schedule the first step fetches everything blocking. `planned` and
    `tables`: the results of `plan_batches` and `place_tables`, to reuse them."""
    samples = -(-len(source.get_lengths(0)) // cluster.gpus)
    machine = (cluster.model, cluster.calibration, cluster.network, cluster.gpus)
    tables = tables or place_tables(
        setting.placement, cluster.model, source, cluster.gpus, setting.cache_miss
    )
    rows = tables.replicated_rows
    costs = Costs(*machine, setting.transport, samples, cluster.jitter, rows)
    ranks = Ranks(cluster.gpus, cluster.network.queue_ms * 1e-3)
    assigned = None
    if not planned:
        assigned = _AssignedBatches(setting.balance, setting.adapt, cluster, source, steps)
    batches = map(partial(_apply_setting, setting), planned or assigned or ())
    previous: Batch | None = None
    current = next(batches, None)
    balanced = setting.balance != "none"
    schedule = SimulatedSchedule(ranks, costs, setting.schedule, balanced, tables)
    number = 0
    while current is not None:
        following = next(batches, None)
        step = schedule.run(number, previous, current, following)
        step.counters = _list_counters(current, tables)
        if assigned is not None:
            assigned.learn(step)
        yield step
        previous, current, number = current, following, number + 1


def plan_batches(balance: str, cluster: Cluster, source: Workload, steps: int) -> list[Batch]:
    """Plans the batches of a run, for several settings: unless the cost model learns, they depend
    only on the partitioner."""
    return list(_AssignedBatches(balance, False, cluster, source, steps))


def _apply_setting(setting: Setting, batch: Batch) -> Batch:
    """Adapts the requests of a batch to the setting."""
    demand = batch.demand
    if demand.pooled is not None and setting.schedule != "sparse_dist":
        demand = _pool_on_requesters(demand, batch.lookups)
    if setting.schedule == "stale":
        nothing = Rows(np.zeros_like(demand.whole.requested), np.zeros_like(demand.whole.requested))
        demand = replace(demand, late=nothing, urgent=nothing)
    if not setting.deduplicate:
        demand = replace(demand, whole=Rows.spread(batch.lookups))
    return replace(batch, demand=demand)


def _pool_on_requesters(demand: Demand, lookups: NDArray[Any]) -> Demand:
    """Rows of pooled features travel like those of histories."""
    pooled = demand.pooled
    assert pooled is not None
    return Demand(
        demand.whole + pooled.whole,
        demand.late + pooled.late,
        demand.urgent + pooled.urgent,
        lookups + pooled.ids,
        pooled_here=pooled.ids,
    )


class _AssignedBatches:
    """The batches assigned by a partitioner of training, each compared with its neighbours."""

    def __init__(
        self, balance: str, adapt: bool, cluster: Cluster, source: Workload, steps: int
    ) -> None:
        self._balanced, self._adapt = balance != "none", adapt
        self._gpus, self._source, self._steps = cluster.gpus, source, steps
        model, head = cluster.model, cluster.model.width // cluster.model.heads
        cost = CostModel.of_hstu(
            width=model.width,
            layers=model.layers,
            heads=model.heads,
            d_qk=head,
            d_v=head,
            negatives=model.negatives,
        ).with_prefix(model.prefix)
        cost = replace(cost, visible=model.visible)
        nodes = cluster.network.assign_nodes(cluster.gpus)
        split = cluster.split_histories if self._balanced and not adapt else "off"
        self._balancer = Balancer(
            find_partitioner(balance), cost, nodes=nodes, adapt=adapt, split_histories=split
        )

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
        """(lengths [n], ranks that read them [n], their assignment, the requests of the ranks)."""
        lengths, gpus = self._source.get_lengths(step), self._gpus
        home = assign_home(len(lengths), gpus)
        table = np.stack([lengths, np.zeros_like(lengths), lengths], axis=1)
        assignment = self._balancer.plan(step, table, home, gpus)
        division, rank_of = assignment.division, assignment.rank_of
        if division is not None:
            lengths, home = division.stop - division.start, home[division.sample]
            rank_of = rank_of[division.is_last]  # rank of the last part, which reads the rows
        return lengths, home, assignment, self._source.find_requests(step, rank_of, gpus)

    def _make_batch(
        self, lengths: NDArray[Any], home: NDArray[Any], assignment: Assignment, demand: Demand
    ) -> Batch:
        moving = assignment.rank_of != home
        source = self._source
        sizes = lengths[moving] * source.bytes_per_token + source.bytes_per_sample
        out = np.bincount(home[moving], sizes, self._gpus)
        into = np.bincount(assignment.rank_of[moving], sizes, self._gpus)
        visible = self._balancer.cost.visible
        load = Load.from_assignment(lengths, assignment.rank_of, self._gpus, visible)
        longest, parts = int(lengths.max(initial=0)), None
        if (division := assignment.division) is not None:
            longest = int(division.stop.max())
            stop, start = division.stop.astype(np.float64), division.start.astype(np.float64)
            squares = square(stop, visible) - square(start, visible)
            load = replace(load, squares=np.bincount(assignment.rank_of, squares, self._gpus))
            parts = np.array(
                [
                    [sum(route.send), sum(route.receive)]
                    for rank in range(self._gpus)
                    for route in [division.route(assignment.rank_of, rank, self._gpus)]
                ]
            )
        imbalance = assignment.imbalance if self._balanced else None
        return Batch(load, demand, out, into, longest, imbalance, assignment.moved_tokens, parts)

    def learn(self, step: Step) -> None:
        if self._adapt:
            computed = [span for span in step.spans if span[0] in ("forward", "backward")]
            seconds = np.sum([end - begin for _, begin, end in computed], axis=0)
            self._balancer.learn(step.number, seconds)


def _list_counters(batch: Batch, tables: PlacedTables) -> dict[str, NDArray[Any]]:
    """The counters of the ledgers. Replicated rows are never requested."""
    counted = {"samples": batch.load.samples, "tokens": batch.load.tokens}
    if tables.sharded:
        counted |= {"requests": batch.demand.whole.owned, "collisions": batch.demand.late.owned}
    if tables.missed is not None:
        wanted = batch.demand.whole.owned
        missed = tables.count_missed(wanted)
        size = missed * tables.row_bytes[ITEM]
        counted |= {"cache_wanted": wanted, "cache_missed": missed}
        counted |= {"cache_bytes_up": size, "cache_bytes_down": size}
    ranks = len(batch.load.samples)
    most = {"max_length": float(batch.longest)}
    if batch.predicted_imbalance is not None:
        most |= {
            "max_predicted_imbalance": batch.predicted_imbalance,
            "max_moved_tokens": float(batch.moved_tokens),
        }
    return counted | {name: np.full(ranks, value) for name, value in most.items()}
