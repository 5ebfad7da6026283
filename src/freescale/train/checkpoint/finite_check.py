"""Whether tensors are finite, checked before they replace an earlier checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# reduced as they are; others are small and are copied
_REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class NotFinite(ValueError):
    """A model has diverged."""


def find_not_finite(tensors: Mapping[str, Tensor], untrained: Collection[str] = ()) -> str | None:
    """The name of a tensor that holds NaN or infinity in this rank's part, or None.

    Tensors that are not trained may be infinite: attention masks are. Takes one pass over each
    tensor, without a copy; the host waits once for each device.
    """
    ends: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        values = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.is_floating_point() and values.numel():
            values = values if values.dtype in _REDUCED else values.float()
            # NaN if any value is
            ends.setdefault(values.device, {})[name] = torch.stack(torch.aminmax(values)).double()
    for found in ends.values():
        for name, (low, high) in zip(found, torch.stack([*found.values()]).tolist(), strict=True):
            if math.isnan(low) or (name not in untrained and (math.isinf(low) or math.isinf(high))):
                return name
    return None
