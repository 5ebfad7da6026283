"""`fixed`: equal counts, dealt zig-zag; on the host, or sorted by a GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freescale.balance.partitioners.common import descending
from freescale.balance.problem import Problem


def fixed(problem: Problem) -> np.ndarray:
    """Sorted by cost, dealt zig-zag (the paper's FBS): rank i of n gets sorted positions i, 2n-1-i,
    2n+i, ... Counts differ by one at most. Knows no cap."""
    order = descending(problem.costs)
    place = np.arange(len(order)) % (2 * problem.ranks)
    rank_of = np.empty(len(order), np.int64)
    rank_of[order] = np.minimum(place, 2 * problem.ranks - 1 - place)
    return rank_of


def deal(costs: Tensor, ranks: int) -> Tensor:
    """costs [n] -> rank of each [n]: sorted by falling cost (ties in order), dealt zig-zag."""
    order = torch.argsort(-costs, stable=True)
    place = torch.arange(costs.numel(), device=costs.device) % (2 * ranks)
    dealt = torch.minimum(place, 2 * ranks - 1 - place)
    return torch.empty_like(dealt).scatter_(0, order, dealt)


class FixedOnDevice:
    """A partitioner like `fixed`. Has a stream of its own, ahead of the compute's, and waits for
    that one alone."""

    __name__ = "fixed"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._pinned = torch.zeros(0, dtype=torch.int64)

    def __call__(self, problem: Problem) -> np.ndarray:
        if self._stream is None:
            return deal(torch.from_numpy(problem.costs), problem.ranks).numpy()
        # made once: pinning takes longer than planning
        if self._pinned.numel() < len(problem.costs):
            self._pinned = torch.zeros(len(problem.costs), dtype=torch.int64).pin_memory()
        result = self._pinned[: len(problem.costs)]
        costs = result.view(torch.float64)
        costs.copy_(torch.from_numpy(problem.costs))
        with torch.cuda.stream(self._stream):
            rank_of = deal(costs.to(self._device, non_blocking=True), problem.ranks)
            result.copy_(rank_of, non_blocking=True)
        self._stream.synchronize()
        return result.numpy().copy()
