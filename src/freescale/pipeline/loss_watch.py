"""A loss that is not a number ends a run: what is trained from there on is lost."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from freescale.streams import record_event

_LATER = 2  # steps, on a GPU: the host waits only where it is further ahead of the device than this


class LossNotFinite(ValueError):
    """The loss of a step is infinite or not a number."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss is {loss} at step {step}: lower the learning rates of dense parameters and "
            "rows, or clip their gradients "
            "(`clip` of the pipeline, `row_clip` of parallelize)"
        )
        self.step, self.loss = step, loss


class LossWatch:
    """Looks at the summed loss, which all ranks share: they raise at the same step."""

    def __init__(self) -> None:
        self._coming: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def see(self, step: int, total: Tensor) -> None:
        if total.device.type == "cpu":
            _check(step, total)
            return
        copy = torch.empty(total.shape, dtype=total.dtype, pin_memory=True)
        copy.copy_(total, non_blocking=True)
        self._coming.append((step, copy, record_event(blocking=True)))
        self._check_all_but(_LATER)

    def finish(self) -> None:
        """The run ends: the last ones."""
        self._check_all_but(0)

    def _check_all_but(self, newest: int) -> None:
        while len(self._coming) > newest:
            step, copy, event = self._coming.popleft()
            event.synchronize()
            _check(step, copy)


def _check(step: int, total: Tensor) -> None:
    loss = float(total)
    if not math.isfinite(loss):
        raise LossNotFinite(step, loss)
