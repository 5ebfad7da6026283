"""Whether tensors are finite, checked before they replace an earlier checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Reduced as they are; others are small and are copied.
_REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PIECE = 1 << 24  # numbers that NumPy reduces at a time, without Python's lock
_ALONE = 1 << 15  # numbers that torch reduces without other threads


class NotFinite(ValueError):
    """A model has diverged."""


def find_not_finite(
    tensors: Mapping[str, Tensor], untrained: Collection[str] = (), *, background: bool = False
) -> str | None:
    """The name of a tensor that holds NaN or infinity in this rank's part, or None; `untrained`
    ones may be infinite, as attention masks are. One pass without a copy; the host waits once for
    each device. `background`: tensors are on the host and training goes on: uses one core."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        values = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.is_floating_point() and values.numel():
            found[name] = values if values.dtype in _REDUCED else values.float()
    if background:
        found = _leave_out_finite(found)
    ends: dict[torch.device, dict[str, Tensor]] = {}
    for name, values in found.items():
        # NaN if any value is
        ends.setdefault(values.device, {})[name] = torch.stack(torch.aminmax(values)).double()
    for of in ends.values():
        for name, (low, high) in zip(of, torch.stack([*of.values()]).tolist(), strict=True):
            if math.isnan(low) or (name not in untrained and (math.isinf(low) or math.isinf(high))):
                return name
    return None


def _leave_out_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The small tensors, views of one copy together, and those in not throughout finite memory."""
    bases = {name: _find_base(values) for name, values in tensors.items()}
    large = {id(base): base for base in bases.values() if base.numel() > _ALONE}
    finite = {key for key, base in large.items() if _is_finite(base)}
    return {name: values for name, values in tensors.items() if id(bases[name]) not in finite}


def _find_base(values: Tensor) -> Tensor:
    base = values._base
    return base if base is not None and base.dtype == values.dtype else values


def _is_finite(values: Tensor) -> bool:
    """Uses NumPy: torch's threads would take all cores from a step's lanes and launches."""
    for piece in torch.split(values.detach().reshape(-1), _PIECE):
        if piece.dtype == torch.bfloat16:  # the upper half of a float32
            halves = piece.view(torch.int16).numpy().view(np.uint16)
            numbers = (halves.astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = piece.numpy()
        if not (np.isfinite(numbers.min()) and np.isfinite(numbers.max())):
            return False
    return True
