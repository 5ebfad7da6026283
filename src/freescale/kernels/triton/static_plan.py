"""The attention's plan for batches of one padded size: its tables stay at one place on the device
and are filled anew for each batch, so that a CUDA graph can read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.triton.attention_plan import TilePlan
from freescale.kernels.upload import upload


@dataclass(frozen=True)
class StaticPlan(TilePlan):
    """As long as the longest batch of the size needs: what a batch lacks are tiles without tokens.
    Biases are not supported: the tables of their gradients have no such tiles."""

    @staticmethod
    def of(plan: TilePlan) -> StaticPlan:
        own = {field.name: getattr(plan, field.name) for field in fields(TilePlan)}
        return StaticPlan(**own | {"kept": {}})

    @property
    def last_position(self) -> int:
        return int(np.iinfo(np.int32).max)  # of any batch

    def _keep(self, key: tuple[str, int]) -> tuple[Tensor, ...]:
        tables: tuple[Tensor, ...] | None = self.kept.get(key)
        if tables is None:
            made = self.compute_tables(key)
            rows = len(self.host) + (self.tokens // key[1] if key[1] else 0)
            tables = self.kept[key] = tuple(
                torch.zeros(rows, *table.shape[1:], dtype=torch.int32, device=self.lengths.device)
                for table in made
            )
            self._write(tables, made)
        return tables

    def refill(self, lengths: np.ndarray) -> None:
        """For another batch of the same size, on the current stream."""
        other = replace(self, host=lengths, history=lengths, kept={})
        for key, tables in self.kept.items():
            self._write(tables, other.compute_tables(key))

    def _write(self, tables: tuple[Tensor, ...], made: tuple[np.ndarray, ...]) -> None:
        for table, values in zip(tables, made, strict=True):
            whole = np.zeros(table.shape, np.int32)
            whole[: len(values)] = values
            table.copy_(upload(whole, table.device), non_blocking=True)


class StaticPlans:
    """The plans that a model makes for batches of one size."""

    def __init__(self) -> None:
        self._plans: dict[Any, StaticPlan] = {}

    def find(self, key: Any, make: Callable[[], TilePlan]) -> StaticPlan:
        """The plan of this key; made from that of the first batch."""
        if key not in self._plans:
            self._plans[key] = StaticPlan.of(make())
        return self._plans[key]

    def refill(self, lengths: np.ndarray) -> None:
        """For another batch of the same size."""
        for plan in self._plans.values():
            plan.refill(lengths)
