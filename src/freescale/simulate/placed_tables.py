"""Places the tables of a simulated run by the rule of training, and by the same function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.embedding.dynamic_rules import Dynamic
from freescale.embedding.layout import TableSpec
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.placement import Placement, choose_placement, count_state_bytes
from freescale.simulate.compute import Model
from freescale.simulate.growth import Growth, describe_growth, predict_growth
from freescale.simulate.workload import GrowingWorkload, Workload

ITEM = "item"  # the table that may be sharded


@dataclass(frozen=True)
class PlacedTables:
    """Where the tables of a run lie."""

    placements: dict[str, Placement]
    rows: dict[str, int]
    row_bytes: dict[str, int]  # of a row and its optimizer's state
    # share of a step's rows that are in host memory and not in the cache; None: rows are on the
    # device
    missed: float | None = None
    ranks: int = 1
    dynamic: Dynamic | None = None  # the rules of the item table, if it is dynamic
    growth: tuple[Growth, ...] = ()  # of a dynamic item table
    exchanged: Sequence[str] = (ITEM,)  # tables whose requests are counted, if that is sharded

    @property
    def sharded(self) -> bool:
        return self.placements[ITEM].kind == "sharded"

    @property
    def replicated_rows(self) -> int:
        """Rows of the tables that every rank holds. Small tables count in all configurations:
        their rows are too few to matter."""
        exchanged = self.exchanged if self.sharded else ()
        return sum(rows for name, rows in self.rows.items() if name not in exchanged)

    def count_missed(self, owned: NDArray[Any]) -> NDArray[Any]:
        """Rows that owners bring into their caches for the requests `owned` [ranks]. An upper
        bound: rows that several ranks request count several times."""
        return owned * (self.missed or 0.0)

    def count_bytes(self, ranks: int) -> float:
        """Bytes of a rank's share of all tables."""
        return sum(
            rows * self.row_bytes[name] / (ranks if self.placements[name].kind == "sharded" else 1)
            for name, rows in self.rows.items()
        )

    def describe(self) -> list[str]:
        lines = [
            f"table {name}: {self.rows[name]:,} rows, {placed.kind} ({placed.reason})"
            for name, placed in self.placements.items()
        ]
        if self.missed is not None:
            lines.append(
                f"table {ITEM}: at home in host memory; {100 * self.missed:g} % of the rows of a "
                "step are brought over PCIe, and as many written back"
            )
        if self.dynamic is not None:
            lines += describe_growth(ITEM, self.dynamic, self.growth, self.ranks)
        return lines


def place_tables(
    wanted: str,
    model: Model,
    source: Workload,
    ranks: int,
    cache_miss: float = 100.0,
    dynamic: Dynamic | None = None,
    steps: int = 1,
) -> PlacedTables:
    """Places the tables by the rows that ranks read of the first batch, before it is balanced.

    Args:
        wanted: `auto`, or a choice for all tables; `host`: items are sharded in host memory, the
            others placed by the rule.
        model: The model; its row optimizer determines the state of each row.
        source: The batches.
        ranks: Number of ranks.
        cache_miss: With `host`, percent of a step's rows that are not in the cache.
        dynamic: The rules of the item table, if it is dynamic.
        steps: Steps of the simulation, over which a dynamic table grows.
    """
    hosted = wanted == "host"
    samples = len(source.get_lengths(0))
    first = source.find_requests(0, assign_home(samples, ranks), ranks)
    read = {ITEM: float(source.compute_demand(None, first, None).whole.requested.mean())}
    rows = {ITEM: source.items if dynamic is None else dynamic.rows}
    exchanged = [ITEM]
    for table in source.list_small_tables(ranks):
        read[table.name], rows[table.name] = table.rows_read, table.rows
        if table.sharded:
            read[ITEM] -= table.rows_read
            exchanged.append(table.name)
    placements, row_bytes = {}, {}
    for name, count in rows.items():
        spec = TableSpec(name, count, model.width, torch.float32, ())
        state = count_state_bytes(ROW_OPTIMIZERS[model.row_optimizer](), spec)
        row_bytes[name] = model.row_bytes + state
        placements[name] = (
            choose_placement(spec, state, read[name])
            if wanted == "auto" or (hosted and name != ITEM)
            else Placement("sharded" if hosted else wanted, "as given")
        )
    growth: list[Growth] = []
    if dynamic is not None:
        assert isinstance(source, GrowingWorkload)
        placements[ITEM] = Placement("sharded", "dynamic")
        counted = source.list_growth_steps(steps)
        admitted = source.count_admitted(counted, dynamic.admit.batches, ranks)
        growth = predict_growth(dynamic, counted, admitted, row_bytes[ITEM])
    missed = cache_miss / 100 if hosted else None
    grown = (dynamic, tuple(growth))
    return PlacedTables(placements, rows, row_bytes, missed, ranks, *grown, exchanged)


def assign_home(samples: int, ranks: int) -> NDArray[np.int64]:
    """[samples] the rank that reads each sample of a global batch, as the loader slices it."""
    bounds = samples * np.arange(ranks + 1) // ranks
    home: NDArray[np.int64] = np.repeat(np.arange(ranks), np.diff(bounds))
    return home
