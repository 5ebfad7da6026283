"""How torch's writer goes through the tensors of a checkpoint that is written beside training: with
as little of the interpreter as may be, which the step needs."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

# Seconds between two tensors. To write one takes some 0.3 ms of the interpreter, and there are
# hundreds: one after the other they would hold up a step for as long, spread they find its pauses.
_PAUSE = 0.003
_numbers = count()

Described = list[tuple[Any, ...]]


@dataclass
class Series:
    """Checkpoints one after the other, by the same ranks. What they have alike is planned once."""

    key: str = field(default_factory=lambda: f"freescale {next(_numbers)}")  # of torch's plans
    planned: Described | None = None  # the tensors of the last plan


class PacedPlanner(DefaultSavePlanner):
    """Of one checkpoint. It takes its time."""

    def __init__(self, series: Series) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = series.key
        self._series = series
        self._tensors: Described = []

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: Any = None,
        is_coordinator: bool = False,
    ) -> None:
        self._tensors = _describe(state_dict)
        if self._tensors == self._series.planned:
            self.state_dict, self.is_coordinator = state_dict, is_coordinator
        else:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """As torch's, which would make a plan to find that it has the same."""
        if self._tensors == self._series.planned:
            return SavePlan([], usable=False)
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._series.planned = self._tensors
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        time.sleep(_PAUSE)
        return super().resolve_data(write_item)


def _describe(tensors: Mapping[str, Tensor]) -> Described:
    """All that a plan depends on: names, shapes and types, and a rank's part of what is sharded."""
    return [
        (name, value.shape, value.dtype, value._local_tensor.shape, value.placements)
        if isinstance(value, DTensor)
        else (name, value.shape, value.dtype)
        for name, value in tensors.items()
    ]
