"""Ends a run whose loss is not finite: its weights are lost from there on."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from freescale.streams import record_event

# Steps after which a loss is read on a GPU: the host waits only if it is further ahead than that.
_LATER = 2


class LossNotFinite(ValueError):
    """The loss of a step is infinite or not a number. Later steps may have been made meanwhile.

    Attributes:
        step: the first with such a loss.
        loss: of it.
        batch_number: of its global batch.
    """

    def __init__(self, step: int, loss: float, batch_number: int) -> None:
        super().__init__(
            f"the loss is {loss} at step {step}: lower the learning rates of dense parameters and "
            "rows, or clip their gradients (`clip` of the pipeline, `row_clip` of parallelize)"
        )
        self.step, self.loss, self.batch_number = step, loss, batch_number


class LossWatch:
    """Checks the summed loss, which is the same on all ranks: they raise at the same step."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, int, Tensor, torch.cuda.Event]] = deque()
        self._spare: list[Tensor] = []  # pinned memory, read and free again

    def watch(self, step: int, batch_number: int, total: Tensor) -> None:
        """Takes the loss of a step, a scalar; on a GPU it is read some steps later.

        Raises:
            LossNotFinite: this loss or an earlier one is not finite.
        """
        if total.device.type == "cpu":
            _check(step, batch_number, total)
            return
        copy = self._spare.pop() if self._spare else self._pin(total)
        copy.copy_(total, non_blocking=True)
        self._pending.append((step, batch_number, copy, record_event(blocking=True)))
        self._check_all_but(_LATER)

    @staticmethod
    def _pin(total: Tensor) -> Tensor:
        return torch.empty(total.shape, dtype=total.dtype, pin_memory=True)

    def finish(self) -> None:
        """Checks the losses that are left: at the end of a run, and before it is saved."""
        self._check_all_but(0)

    def _check_all_but(self, newest: int) -> None:
        while len(self._pending) > newest:
            step, batch_number, copy, event = self._pending.popleft()
            event.synchronize()
            _check(step, batch_number, copy)
            self._spare.append(copy)


def _check(step: int, batch_number: int, total: Tensor) -> None:
    loss = float(total)
    if not math.isfinite(loss):
        raise LossNotFinite(step, loss, batch_number)
