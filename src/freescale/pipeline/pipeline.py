"""`Pipeline`: picks a schedule by name."""

from __future__ import annotations

from typing import Any

import torch

from freescale.config import TrainConfig
from freescale.embedding.parallelize import ShardedModel
from freescale.pipeline.serial import Serial
from freescale.pipeline.staged import Staged

SCHEDULES = {"staged": Staged, "serial": Serial}


def Pipeline(
    parallel: ShardedModel,
    optimizer: torch.optim.Optimizer,
    *,
    schedule: str = TrainConfig.schedule,
    **options: Any,
) -> Serial | Staged:
    """A schedule over a parallelized model and the optimizer of its dense parameters; `options` are
    the schedule's."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; there is {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule](parallel, optimizer, **options)
