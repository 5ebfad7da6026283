"""The operations around the attention of an HSTU layer, in plain torch: the norm before it, SiLU
and split, the gated norm after it.

`dtype` is that of the next product. `layer.triton` rounds once; this rounds after each operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.random import derive, draw_keep_mask


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x [tokens, width] -> the same shape, in `dtype`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


def silu_split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """x [tokens, sum(sizes)] -> SiLU(x), split into columns of these sizes."""
    return torch.split(F.silu(x), list(sizes), dim=1)


def gated_norm(
    x: Tensor,  # [tokens, width]
    gate: Tensor,  # [tokens, width], may be a slice of a wider projection
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    keys: Tensor | None = None,  # [tokens] int64: random keys; None: no dropout
    stream: int = 0,  # number of the draw from a key; each layer has its own
    keep: float = 1.0,  # share of the elements that is kept
) -> Tensor:  # [tokens, width], in `dtype`
    """layer_norm(x) * gate, with dropout as a function of the tokens' random keys."""
    gated = F.layer_norm(x, weight.shape, weight, bias, eps) * gate
    if keys is not None:
        mask = draw_keep_mask(derive(keys, stream), gated.shape[1], keep)
        gated = gated * mask.to(gated.dtype).mul_(1 / keep)
    return gated.to(dtype)
