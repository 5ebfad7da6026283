"""Checks of what a schedule is given."""

from __future__ import annotations

import torch

from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import MakeReducer

DENSE_SUMS = ("auto", "collective", "partitioned")


def check_options(accumulate: int, dense_sums: str, reducer: MakeReducer | None) -> None:
    """Raises a ValueError for values that no schedule has."""
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    if dense_sums not in DENSE_SUMS:
        raise ValueError(f"dense_sums must be one of {', '.join(DENSE_SUMS)}, not {dense_sums!r}")
    if dense_sums == "partitioned" and reducer is not None:
        raise ValueError(
            "compressed gradients are summed in their own way: "
            "dense_sums='partitioned' is for exact ones"
        )


def check_optimizer(parallel: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer of another model, or of the model before it was parallelized: it would
    train nothing."""
    own = {id(parameter) for parameter in parallel.dense_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in held if id(parameter) not in own]
    if strange:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:3])
        raise ValueError(
            f"{len(strange)} of the optimizer's {len(held)} parameters are not the model's "
            f"(shapes {shapes}): make it of `sharded.dense_parameters()`; tables have a row "
            "optimizer of their own"
        )
