"""What a step of a pipeline returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, repr=False)
class StepResult:
    """What a step did; the same on every rank. Losses stay tensors until they are read: reading
    waits for the device.

    Attributes:
        step: optimizer steps made so far, this one included.
        batch_number: number of the global batch, as its `SequenceBatch.number` says.
        losses: mean per task over the global batch, scalars (empty on a rank that never had a
            batch: it knows no task).
        counts: weight per task of the global batch: what the losses were divided by.
        total: scalar that was differentiated: the weighted sum of the losses.
        gradient_norm: scalar norm of the dense gradients before clipping; None without `clip`.
    """

    step: int
    batch_number: int
    losses: Mapping[str, Tensor]
    counts: Mapping[str, float]
    total: Tensor
    gradient_norm: Tensor | None

    @property
    def loss(self) -> float:
        """`total` as a number. Waits for the device."""
        return float(self.total)

    def __repr__(self) -> str:
        losses = ", ".join(f"{task} {float(loss):.6g}" for task, loss in self.losses.items())
        return (
            f"StepResult(step={self.step}, batch_number={self.batch_number}, "
            f"loss={self.loss:.6g}" + (f", {losses}" if len(self.losses) > 1 else "") + ")"
        )
