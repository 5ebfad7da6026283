"""How torch's writer goes through the tensors of a checkpoint that is written beside training."""

from __future__ import annotations

import io
import itertools
import time

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

# Seconds between two tensors. To write one takes some 0.3 ms of the interpreter, and there are
# hundreds: one after the other they would hold up a step for as long, spread they find its pauses.
_PAUSE = 0.003
_keys = (f"freescale {number}" for number in itertools.count())


def make_plan_key() -> str:
    """For the plans of a series of checkpoints, by the same ranks."""
    return next(_keys)


class PacedPlanner(DefaultSavePlanner):
    """Plans once what all checkpoints of a series have alike, and takes its time."""

    def __init__(self, key: str) -> None:
        """`key`: of `make_plan_key`."""
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        time.sleep(_PAUSE)
        return super().resolve_data(write_item)
