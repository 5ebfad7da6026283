"""Chooses the version of the sampled softmax for a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.softmax import native, reference, triton
from freescale.kernels.softmax.reference import Negatives


def sampled_softmax(
    outputs: Tensor, rows: Tensor, targets: Tensor, negatives: Negatives, lengths: Tensor,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`softmax.reference.sampled_softmax`.

    On a GPU in Triton, with products in autocast's dtype. On a CPU in C for small batches that
    share their negatives, and for negatives of each token.
    """
    inputs = (outputs, rows, targets, negatives, lengths)
    if (
        runs_triton(outputs.device)
        and {outputs.dtype, rows.dtype} <= set(triton.DTYPES)
        and outputs.shape[1] <= triton.MAX_WIDTH
    ):
        kind = outputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return triton.sampled_softmax(*inputs, dtype=dtype, **options)
    compute = (
        native.sampled_softmax
        if native.fits(outputs, rows, negatives)
        else reference.sampled_softmax
    )
    return compute(*inputs, **options)
