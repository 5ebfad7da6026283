"""Dense gradients of a single rank: there is nothing to sum, so they stay where the backward puts
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freescale.kernels.row_updates.native import adam_tensors, fits
from freescale.pipeline.dense.reducer import Reducer
from freescale.transport.api import Transport


class LocalGradients(Reducer):
    """The methods of `GradientBuckets`. A gradient that a backward makes becomes the parameter's
    own, without a buffer to clear and to add to; parameters that a batch did not use have none.
    `clip` alone collects them in flat buffers."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._device = device
        self._flat: dict[torch.dtype, Tensor] = {}
        self._views: list[Tensor] = []
        self._losses: Tensor | None = None
        self._order: list[int] | None = None

    @property
    def flat(self) -> list[Tensor]:  # type: ignore[override]
        """One buffer for each dtype, in use once something is clipped."""
        if not self._flat:
            views: dict[nn.Parameter, Tensor] = {}
            for dtype in dict.fromkeys(p.dtype for p in self.parameters):
                own = [p for p in self.parameters if p.dtype == dtype]
                sizes = [p.numel() for p in own]
                flat = torch.zeros(sum(sizes), dtype=dtype, device=self._device)
                pieces = zip(own, torch.split(flat, sizes), strict=True)
                views |= {p: piece.view_as(p) for p, piece in pieces}
                self._flat[dtype] = flat
            self._views = [views[p] for p in self.parameters]
        return list(self._flat.values())

    @property
    def order(self) -> list[int] | None:
        """Of an earlier run on several ranks, for one that comes."""
        return self._order

    def adopt_order(self, order: Sequence[int] | None) -> None:
        """Keeps the order of an earlier run: here it changes nothing."""
        self._order = None if order is None else list(order)

    def clear(self) -> None:
        """Before the first backward of a step."""
        for parameter in self.parameters:
            parameter.grad = None

    def start(self, transport: Transport, losses: Tensor, longest: int | None = None) -> None:
        """losses [tasks]."""
        self._losses = losses

    def send(self) -> None:
        """Nothing leaves."""

    def reduce(self) -> Tensor:
        """Returns the losses."""
        assert self._losses is not None, "`start` comes first"
        losses, self._losses = self._losses, None
        return losses

    def clip(self, limit: float) -> Tensor:
        """Scales all gradients to a global norm of at most `limit`; returns the norm before.
        Nothing is read by the host."""
        assert self.flat
        self._collect()
        return super().clip(limit)


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
