"""The work of the ranks in a step: lengths, rows that each rank reads, and how many collide.

Two workloads with the same methods: generated_workload.py and recorded_workload.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

PerRank = NDArray[Any]  # [ranks] float64


@dataclass(frozen=True)
class Rows:
    """Requests of a step, by requesting rank and by owner of the rows."""

    requested: PerRank
    owned: PerRank

    @staticmethod
    def spread(requested: PerRank) -> Rows:
        """Requests spread evenly over owners, since the layout scatters rows."""
        return Rows(requested, np.full(len(requested), requested.mean()))

    def __add__(self, other: Rows) -> Rows:
        return Rows(self.requested + other.requested, self.owned + other.owned)

    def __sub__(self, other: Rows) -> Rows:
        return Rows(
            np.maximum(self.requested - other.requested, 0.0),
            np.maximum(self.owned - other.owned, 0.0),
        )


@dataclass(frozen=True)
class PooledDemand:
    """A step's pooled features: requests as in `Demand`, ids, and bags, which the model reads. If
    owners pool, each of them sends a bag; otherwise rows travel, and `Demand` counts them all."""

    whole: Rows
    late: Rows
    urgent: Rows
    ids: PerRank
    bags: PerRank

    @property
    def by_owner(self) -> Rows:
        """The rows that owners read and update if they pool: one for each id."""
        return Rows.spread(self.ids)


@dataclass(frozen=True)
class Demand:
    """A step's requests: all, those that the previous step reads too, those that the next step
    reads too."""

    whole: Rows
    late: Rows
    urgent: Rows
    lookups: PerRank | None = None  # ids before deduplication; None: one for each token
    pooled: PooledDemand | None = None  # in addition to the histories; owners pool
    pooled_here: PerRank | None = None  # ids whose rows the requester pools

    @property
    def early(self) -> Rows:
        return self.whole - self.late

    @property
    def deferred(self) -> Rows:
        return self.whole - self.urgent


@dataclass(frozen=True)
class SmallTable:
    """A further table. Every rank holds it, unless it is sharded."""

    name: str
    rows: int
    rows_read: float  # distinct rows that a rank reads in the first step
    sharded: bool = False  # its requests are among those of the item table


class Workload(Protocol):
    """The batches of a simulated run."""

    notes: list[str]
    items: int  # rows of the item table
    # moved with a balanced sample: for each of its tokens, and for itself
    bytes_per_token: int
    bytes_per_sample: int

    def list_small_tables(self, ranks: int) -> list[SmallTable]:
        """The tables other than that of the items."""

    def get_lengths(self, step: int) -> NDArray[Any]:
        """[samples of the global batch] int64."""

    def find_requests(self, step: int, rank_of: NDArray[Any], ranks: int) -> Any:
        """The requests of the ranks when sample i is computed on rank_of[i], for
        `compute_demand`."""

    def compute_demand(self, before: Any | None, now: Any, after: Any | None) -> Demand:
        """Compares the requests of `now` with those of the steps around it."""


@runtime_checkable
class GrowingWorkload(Protocol):
    """A workload that predicts the growth of a dynamic item table."""

    def list_growth_steps(self, steps: int) -> list[int]:
        """The steps after which growth is known, if `steps` are simulated."""

    def count_admitted(self, steps: Sequence[int], seen: int, ranks: int) -> list[float]:
        """Ids that occur in at least `seen` of the first global batches, for each of these
        numbers of batches, ascending. Negatives do not count."""
