"""Chooses the version of the sums of draws of a dynamic table's ids for a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.id_map import reference, triton


class DrawSums(Protocol):
    """The functions of `id_map.reference`."""

    def add_draws(
        self, sums: Tensor, keys: Tensor, worth: Tensor, lowest: int, *, take_back: bool = False
    ) -> None: ...
    def estimate_log(self, sums: Tensor, keys: Tensor, lowest: int) -> Tensor: ...


def choose_draw_sums(device: torch.device) -> DrawSums:
    return triton if runs_triton(device) else reference
