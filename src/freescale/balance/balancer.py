"""How the batches of a run are balanced: a partitioner, a cost model and what they learn from
measured times.

Frozen (the default), an assignment is a function of the batch alone. Adapting, it also depends on
times that were gathered from all ranks; these, and the assignments of batches not yet computed, are
then part of a checkpoint.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.balance.cost import AdaptiveCost, CostModel
from freescale.balance.division import Division, divide
from freescale.balance.partitioners.greedy import greedy
from freescale.balance.partitioners.local import local
from freescale.balance.partitioners.lookup import find_partitioner
from freescale.balance.problem import Assignment, Partitioner, Problem, assign, find_lower_bound
from freescale.batch import SequenceBatch
from freescale.config import TrainConfig, parse_split

_CAPPED = (greedy, local)  # partitioners that keep a cap
_REMEMBERED = 8  # steps whose measurement may be outstanding


@dataclass(frozen=True)
class _Planned:
    rank_of: NDArray[Any]  # [n]
    summed: NDArray[Any]  # [ranks, 4]: features of each rank's samples
    predicted: NDArray[Any]  # [ranks]
    in_seconds: bool


class Balancer:
    """Distributes the samples of each global batch over the ranks, by what they will cost.

    Every rank makes the same calls with the same gathered arguments.

    Args:
        partitioner: the name of a partitioner ("greedy"), or a function from `Problem` to the rank
            of each sample ([n] int64). A function runs on every rank with the same argument and
            has to be deterministic.
        cost: what a sample costs; None counts an event of `feature` as one unit.
        cap: tokens that a rank may hold. Partitioners that keep a cap have a default, mean +
            largest sample, which can always be met.
        nodes: [ranks] the machine of each rank; None: all are on one.
        adapt: corrects the cost model by measured times, and gives them to the partitioner.
        feature: the sequence feature whose length is the L of the cost. None: L is the number of
            ids in all of a sample's sequences.
        least_gain: in units of the cost. Samples stay where they are if the best assignment could
            relieve the slowest rank by less; 0: they always move.
        split_histories: "off"; "auto" or a number of parts divides the samples that cost more than
            a rank's share (division.py), which the model has to support: `HSTU` does.

    Raises:
        ValueError: there is no partitioner of this name, or histories cannot be divided so.
    """

    def __init__(
        self,
        partitioner: str | Partitioner,
        cost: CostModel | None = None,
        cap: int | None = TrainConfig.balance_cap,
        nodes: NDArray[np.int64] | None = None,
        adapt: bool = TrainConfig.balance_adapt,
        feature: str | None = "history",
        least_gain: float = 0.0,
        split_histories: str | int = TrainConfig.split_histories,
    ) -> None:
        if isinstance(partitioner, str):
            partitioner = find_partitioner(partitioner)
        elif not callable(partitioner):
            raise TypeError(
                f"partitioner is {partitioner!r}: give a name ('greedy') or a function from "
                "Problem to the rank of each sample"
            )
        self.partitioner: Partitioner = partitioner
        self.feature = feature
        cost = CostModel(quadratic=0.0, linear=1.0) if cost is None else cost
        self.cost = cost
        self.cap = cap
        self.nodes = nodes
        self.least_gain = least_gain
        self.split_histories = parse_split(split_histories)
        if self.divides and (adapt or feature is None):
            raise ValueError(
                f"split_histories={split_histories!r} divides the sequence of a feature by frozen "
                f"costs: give a feature, and adapt=False; got feature={feature!r}, adapt={adapt}"
            )
        self.adaptive = AdaptiveCost(cost) if adapt else None
        self.errors = np.zeros(0)
        """|predicted - measured| / measured per rank, of the last step measured. Frozen costs are
        scaled to the measured total first."""
        self._times: NDArray[Any] | None = None  # [ranks], of the last step measured
        self._planned: dict[int, _Planned] = {}  # by step
        # by step: assignments that a checkpoint had in flight
        self._restored: dict[int, NDArray[Any]] = {}

    @property
    def divides(self) -> bool:
        """Whether it may divide histories."""
        return self.split_histories != "off"

    def check(self, batch: SequenceBatch) -> None:
        """Raises ValueError if the cost needs the length of a feature that the batch lacks."""
        by_length = self.adaptive is not None or self.cost.quadratic or self.cost.linear
        named = self.feature is not None
        if by_length and named and len(batch) and self.feature not in batch.sequences:
            raise ValueError(
                f"balancing takes the length of the sequence feature {self.feature!r}, which the "
                f"batch lacks; its sequences are {', '.join(sorted(batch.sequences)) or 'none'}: "
                "name one of them, Balancer(..., feature=...), or give a cost without lengths"
            )

    def plan(self, step: int, table: NDArray[Any], home: NDArray[Any], ranks: int) -> Assignment:
        """Plans a step's global batch. table [n, 3]: length of the feature, candidates, tokens;
        home [n]: current rank."""
        division = self._divide(table, ranks)
        if division is None:
            rows, tokens = self._measure(table)
        else:
            (rows, tokens), home = division.measure(table, self.cost.visible), home[division.sample]
        cap = self.cap
        if cap is None and self.partitioner in _CAPPED:
            cap = -(-int(tokens.sum()) // ranks) + int(tokens.max(initial=0))
        cost = self.adaptive.model if self.adaptive else self.cost
        problem = Problem(
            cost.of(rows),
            tokens,
            home,
            ranks,
            cap,
            self.nodes,
            self._times if self.adaptive else None,
        )
        restored = self._restored.pop(step, None)
        if restored is not None and len(restored) == len(table):
            assignment = assign(problem, lambda _: restored)
        else:
            assignment = assign(problem, self.partitioner)
        self._remember(step, assignment, rows, ranks)
        return assignment if division is None else replace(assignment, division=division)

    def keep(self, table: NDArray[Any], home: NDArray[Any], ranks: int) -> Assignment | None:
        """The assignment that moves nothing if another cannot gain `least_gain`, else None.
        Arguments as in `plan`. Moving has a price that does not depend on the samples' cost."""
        if not self.least_gain or self.adaptive is not None or not len(table):
            return None
        if self._divide(table, ranks) is not None:
            return None
        rows, tokens = self._measure(table)
        costs = self.cost.of(rows)
        loads = np.bincount(home, costs, ranks)
        bound = find_lower_bound(costs, ranks)
        if loads.max() - bound >= self.least_gain:
            return None
        if self.cap is not None and np.bincount(home, tokens, ranks).max() > self.cap:
            return None
        return Assignment(home, loads, loads, bound, 0, "none")

    def _divide(self, table: NDArray[Any], ranks: int) -> Division | None:
        if not self.divides or ranks == 1:
            return None
        return divide(table, self.cost, ranks, self.split_histories, self.least_gain)

    def _measure(self, table: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """[n, 4] features and [n] tokens of the samples of a table."""
        return self.cost.measure(table[:, 0], table[:, 1]), table[:, 2]

    def _remember(
        self, step: int, assignment: Assignment, of_sample: NDArray[Any], ranks: int
    ) -> None:
        summed = np.stack([np.bincount(assignment.rank_of, of, ranks) for of in of_sample.T], 1)
        fitted = self.adaptive if self.adaptive is not None and self.adaptive.calibrated else None
        predicted = assignment.loads if fitted is None else fitted.predict(summed)
        self._planned[step] = _Planned(assignment.rank_of, summed, predicted, fitted is not None)
        for old in [number for number in self._planned if number <= step - _REMEMBERED]:
            del self._planned[old]

    def learn(self, step: int, seconds: NDArray[Any]) -> None:
        """Learns from gathered compute seconds [ranks] of a step; 0: unknown."""
        planned = self._planned.get(step)
        if planned is None or len(planned.summed) != len(seconds):
            return
        known = (seconds > 0) & (planned.summed[:, 3] > 0)
        if planned.predicted[known].sum() > 0:
            predicted, measured = planned.predicted[known], seconds[known]
            if not planned.in_seconds:
                predicted = predicted * (measured.sum() / predicted.sum())
            self.errors = np.abs(predicted - measured) / measured
        self._times = seconds
        if self.adaptive is not None:
            self.adaptive.update(planned.summed, seconds)

    @property
    def error(self) -> float | None:
        """Median of `errors`; None before anything was measured."""
        return statistics.median(self.errors.tolist()) if self.errors.size else None

    def __repr__(self) -> str:
        name = getattr(self.partitioner, "__name__", type(self.partitioner).__name__)
        kind = "adaptive" if self.adaptive is not None else "frozen"
        return f"Balancer({name}, feature={self.feature!r}, {kind} {self.cost}, cap={self.cap})"

    # ---- state: nothing to keep while the cost is frozen

    def state_dict(self, applied: int) -> dict[str, Any]:
        """State after `applied` steps; assignments of later steps are in flight."""
        if self.adaptive is None:
            return {}
        later = {
            str(step): one.rank_of.tolist() for step, one in self._planned.items() if step > applied
        }
        ranks = next((len(one.summed) for one in self._planned.values()), 0)
        state = {"cost": self.adaptive.state_dict(), "ranks": ranks, "assignments": later}
        if hasattr(self.partitioner, "state_dict"):
            state["partitioner"] = self.partitioner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], ranks: int) -> None:
        """With another number of ranks, batches in flight are assigned again."""
        if self.adaptive is None or not state:
            return
        self.adaptive.load_state_dict(state["cost"])
        if "partitioner" in state and hasattr(self.partitioner, "load_state_dict"):
            self.partitioner.load_state_dict(state["partitioner"])
        if state["ranks"] == ranks:
            self._restored = {
                int(step): np.array(rank_of, np.int64)
                for step, rank_of in state["assignments"].items()
            }


def make_balancer(
    balance: str | Partitioner | Balancer | None, device: torch.device | str = "cpu"
) -> Balancer | None:
    """Resolves the `balance` of a pipeline: None or "none", a partitioner's name, a function
    `Problem -> ranks`, or a `Balancer`.

    Returns None if samples stay on their ranks. `fixed` plans on `device` if that is a GPU. Raises
    TypeError or ValueError for anything else.
    """
    if balance is None or balance == "none":
        return None
    if isinstance(balance, str):
        balance = find_partitioner(balance, device)
    return balance if isinstance(balance, Balancer) else Balancer(balance)
