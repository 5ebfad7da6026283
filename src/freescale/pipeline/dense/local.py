"""Dense gradients of a single rank: there is nothing to sum, so they stay where the backward puts
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

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
