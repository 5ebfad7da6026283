"""The attention's plan for batches of one padded size, for CUDA graphs: its tables keep their
addresses on the device and are refilled for each batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention.plan_columns import PAIR_QUERIES, TileColumn
from freescale.kernels.attention.triton_plan import TilePlan, subtract_first
from freescale.kernels.upload import upload


@dataclass(frozen=True)
class StaticPlan(TilePlan):
    """A plan whose tables fit any batch of the size with histories up to `longest_history`. Unused
    rows are tiles without tokens."""

    timestamps: Tensor | None = None  # [tokens] int64, the source of `times`

    @staticmethod
    def of(plan: TilePlan, longest: int, timestamps: Tensor | None) -> StaticPlan:
        """Makes the plan from that of the first batch."""
        own = {field.name: getattr(plan, field.name) for field in fields(TilePlan)}
        limits = {"longest_history": longest, "longest_distance": longest}
        return StaticPlan(**own | limits | {"kept": {}}, timestamps=timestamps)

    @property
    def pair_blocks(self) -> int:
        of_queries = self.tokens // PAIR_QUERIES + len(self.host)
        return of_queries * (self.longest_history // PAIR_QUERIES + 2)

    def _keep(self, key: tuple[str, int]) -> tuple[Tensor, ...]:
        tables: tuple[Tensor, ...] | None = self.kept.get(key)
        if tables is None:
            made, device = self.compute_tables(key), self.lengths.device
            tables = self.kept[key] = tuple(
                torch.zeros(rows, *table.shape[1:], dtype=torch.int32, device=device)
                for table, rows in zip(made, self._count_rows(key), strict=True)
            )
            self._write(key, tables, made)
        return tables

    def _count_rows(self, key: tuple[str, int]) -> tuple[int, ...]:
        """Most rows of the tables of a (kind, tile size)."""
        (of, size), samples = key, len(self.host)
        if of == "samples":
            return (samples,)
        return (self.tokens // size + samples,)

    def count_sums(self, size: int) -> int:
        of_longest = -(-self.longest_history // size) * size
        return (self.tokens // size + len(self.host)) * of_longest

    def refill(self, lengths: np.ndarray) -> None:
        """Refills the tables for a batch of the same size whose tokens are in place, on the current
        stream."""
        other = replace(self, host=lengths, history=lengths, kept={})
        for key, tables in self.kept.items():
            if key != "edges":
                self._write(key, tables, other.compute_tables(key))
        if self.times is not None:
            assert self.timestamps is not None
            span = 0 if self.times.dtype == torch.int32 else 2**62
            self.times.copy_(subtract_first(self.timestamps, self.lengths, span))

    def _write(
        self, key: tuple[str, int], tables: tuple[Tensor, ...], made: tuple[np.ndarray, ...]
    ) -> None:
        for table, values in zip(tables, made, strict=True):
            whole = np.zeros(table.shape, np.int32)
            whole[: len(values)] = values
            lacking = whole[len(values) :]
            if key[0] in ("queries", "keys"):
                lacking[:, TileColumn.START] = 1  # kernels read the time at START + LENGTH - 1
            table.copy_(upload(whole, table.device), non_blocking=True)


class StaticPlans:
    """The plans that a model makes for batches of one size."""

    def __init__(self, longest: int) -> None:
        """`longest`: most tokens of a sample."""
        self._longest = longest
        self._plans: dict[Any, StaticPlan] = {}

    def find(self, key: Any, make: Callable[[], TilePlan], timestamps: Tensor | None) -> StaticPlan:
        """The plan of this key. The first call makes it from `make()`."""
        if key not in self._plans:
            self._plans[key] = StaticPlan.of(make(), self._longest, timestamps)
        return self._plans[key]

    def refill(self, lengths: np.ndarray) -> None:
        """Refills all plans for a batch of the same size whose tokens are in place."""
        for plan in self._plans.values():
            plan.refill(lengths)
