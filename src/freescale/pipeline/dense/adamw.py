"""torch's AdamW for dense parameters. On one core of a CPU a step is one call of C: for the many
parameters of a small model, torch takes longer to list the tensors than to update them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.row_updates.native import adam_tensors, fits


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with `fused=True`, in its options, state and numbers."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, fused=True, **options)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As torch's."""
        if closure is None and len(self.param_groups) == 1 and self._step_natively():
            return None
        loss: float | None = super().step(closure)
        return loss

    def _step_natively(self) -> bool:
        """Returns False, with nothing done, if the step has to be torch's: before there is a
        state, and with options or tensors that are not the usual ones."""
        group = self.param_groups[0]
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return True
        gradients = [parameter.grad for parameter in parameters]
        states = [self.state.get(parameter) for parameter in parameters]
        usual = not (group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor))
        fit = fits(parameters[0]) and _fit(parameters) and _fit(gradients)
        if not (usual and all(states) and fit):
            return False
        names = "exp_avg", "exp_avg_sq", "step"
        lists = [[state[name] for state in states if state] for name in names]
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return adam_tensors(parameters, gradients, *lists, **options)


def _fit(tensors: Sequence[Tensor | None]) -> bool:
    """Whether C can read them all."""
    return all(
        each is not None and each.is_cpu and each.dtype is torch.float32 and each.is_contiguous()
        for each in tensors
    )
