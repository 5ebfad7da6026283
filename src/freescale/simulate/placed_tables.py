"""Places the tables of a simulated run by the rule of training, and by the same function."""

from __future__ import annotations

import math
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
    cache_miss: float = 100.0,  # percent of a step's rows that are not cached, with `host`
    dynamic: Dynamic | None = None,
    steps: int = 1,
) -> PlacedTables:
    """Places the tables by the rows that ranks read of the first batch, before it is balanced.

    `wanted`: `auto`, or a choice for all tables; `host`: items are sharded in host memory, the
    others placed by the rule. `dynamic`: the rules of the item table, which grows over `steps`.
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


@dataclass(frozen=True)
class Growth:
    """The state of a dynamic table after a number of steps."""

    steps: int
    admitted: float  # ids, including evicted ones
    rows: float  # rows with an id
    fill: float  # share of the capacity that has an id
    row_bytes: float  # bytes of these rows with optimizer state

    @property
    def evicts(self) -> bool:
        """Whether a thousandth of the ids found their shard full."""
        return self.rows < 0.999 * self.admitted


def predict_growth(
    rules: Dynamic, steps: Sequence[int], admitted: Sequence[float], row_bytes: int
) -> list[Growth]:
    """Predicts the rows of a table after each of `steps`, when `admitted` ids have occurred in
    enough batches; a row and its optimizer state take `row_bytes`."""
    found = []
    for count, ids in zip(steps, admitted, strict=True):
        rows = rules.shards * _fill_shard(ids / rules.shards, rules.shard_rows)
        found.append(Growth(count, ids, rows, rows / rules.rows, rows * row_bytes))
    return found


def _fill_shard(mean: float, room: int) -> float:
    """Expected rows of a shard that has room for `room`, if hashing gives it `mean` ids: Poisson
    distributed, approximated by a normal distribution."""
    if mean <= 0:
        return 0.0
    deviation = math.sqrt(mean)
    distance = (room - mean) / deviation
    below = 0.5 * math.erfc(-distance / math.sqrt(2))
    density = math.exp(-distance * distance / 2) / math.sqrt(2 * math.pi)
    return min(mean, room - ((room - mean) * below + deviation * density))


def describe_growth(name: str, rules: Dynamic, growth: Sequence[Growth], ranks: int) -> list[str]:
    """Lines for people."""
    if not growth:
        return []
    row = growth[-1].row_bytes / growth[-1].rows if growth[-1].rows else 0.0
    each = (rules.rows * row / ranks, (rules.map_bytes + rules.counter_bytes) / ranks)
    lines = [
        f"table {name}: {rules}, room for {rules.rows:,} rows: {each[0] / 1e9:,.2f} GB of a rank "
        f"with the state of their optimizer, and {each[1] / 1e9:,.2f} GB of host memory for ids; "
        "what deciding costs is not simulated"
    ]
    return lines + [
        f"table {name}: {one.rows:,.0f} rows after {one.steps:,} step{'s' * (one.steps > 1)}, "
        f"{one.fill:.1%} full, {one.row_bytes / ranks / 1e9:,.2f} GB of a rank"
        f"{'; rows are evicted' if one.evicts else ''}"
        for one in growth
    ]


def list_growth(growth: Sequence[Growth], ranks: int) -> list[dict[str, Any]]:
    """As plain data."""
    return [
        {
            "gpus": ranks,
            "steps": one.steps,
            "rows": one.rows,
            "fill_percent": 100 * one.fill,
            "bytes_per_rank": one.row_bytes / ranks,
            "evicts": one.evicts,
        }
        for one in growth
    ]
