"""`fixed`: equal counts, dealt zig-zag; on the host, or sorted by a GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freescale.balance.problem import Problem


def fixed(problem: Problem) -> np.ndarray:
    """Deals the samples zig-zag in the order of falling cost (the paper's FBS).

    Rank i of n gets the sorted positions i, 2n-1-i, 2n+i, ... Counts differ by at most one. Ignores
    the cap.
    """
    return deal_zig_zag(torch.from_numpy(problem.costs), problem.ranks).numpy()


def deal_zig_zag(costs: Tensor, ranks: int) -> Tensor:
    """`fixed` on the device of `costs`: costs [n] -> rank_of [n] int64."""
    order = torch.argsort(-costs, stable=True)
    place = torch.arange(costs.numel(), device=costs.device) % (2 * ranks)
    dealt = torch.minimum(place, 2 * ranks - 1 - place)
    return torch.empty_like(dealt).scatter_(0, order, dealt)


class FixedOnDevice:
    """`fixed`, sorted on a GPU; pays from a few thousand samples on.

    Runs on a high-priority stream of its own and synchronizes with that stream alone.
    """

    __name__ = "fixed"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._pinned = torch.zeros(0, dtype=torch.int64)

    def __call__(self, problem: Problem) -> np.ndarray:
        if self._stream is None:
            return fixed(problem)
        # Kept between calls: pinning memory takes longer than planning.
        if self._pinned.numel() < len(problem.costs):
            self._pinned = torch.zeros(len(problem.costs), dtype=torch.int64).pin_memory()
        result = self._pinned[: len(problem.costs)]
        costs = result.view(torch.float64)
        costs.copy_(torch.from_numpy(problem.costs))
        with torch.cuda.stream(self._stream):
            rank_of = deal_zig_zag(costs.to(self._device, non_blocking=True), problem.ranks)
            result.copy_(rank_of, non_blocking=True)
        self._stream.synchronize()
        return result.numpy().copy()
