"""How torch's writer goes through the tensors of a checkpoint that is written during training: with
little use of the interpreter, which the step needs."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

# Seconds between two tensors. To write one takes some 0.3 ms of the interpreter, and there are
# hundreds: one after the other they would hold up a step for as long, spread they find its pauses.
_PAUSE = 0.003

Described = list[tuple[Any, ...]]


@dataclass
class Series:
    """Checkpoints one after the other, by the same ranks. What they have alike is planned once."""

    plans: int = 0  # that all ranks have begun to make together
    number: int = 0  # of the plan below, if it was finished
    tensors: Described | None = None  # of this plan
    plan: SavePlan | None = None  # what this rank writes
    metadata: Metadata | None = None  # on rank 0


class PacedPlanner(DefaultSavePlanner):
    """Of one checkpoint. It takes its time."""

    def __init__(self, series: Series) -> None:
        super().__init__()
        self.series = series
        self._tensors: Described = []

    def is_planned(self, tensors: Mapping[str, Any]) -> bool:
        """Whether the plan that is there holds for these, on this rank."""
        series = self.series
        return series.number == series.plans > 0 and _describe(tensors) == series.tensors

    def take_plan(self, tensors: Mapping[str, Any]) -> tuple[SavePlan, Metadata | None]:
        """The plan that is there, for these."""
        assert self.series.plan is not None
        self.state_dict = dict(tensors)
        return self.series.plan, self.series.metadata

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.series.plans += 1
        self._tensors = _describe(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.series.metadata = metadata
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan, series = super().finish_plan(new_plan), self.series
        series.plan, series.tensors, series.number = plan, self._tensors, series.plans
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        time.sleep(_PAUSE)
        return super().resolve_data(write_item)


def _describe(tensors: Mapping[str, Any]) -> Described:
    """All that a plan depends on: names, shapes and types, and a rank's part of what is sharded."""
    return [
        (name, value.shape, value.dtype, value._local_tensor.shape, value.placements)
        if isinstance(value, DTensor)
        else (name, value.shape, value.dtype)
        for name, value in tensors.items()
    ]
