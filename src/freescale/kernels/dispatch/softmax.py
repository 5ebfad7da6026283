"""The version of the sampled softmax that a batch runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.softmax import native, reference, triton
from freescale.kernels.softmax.reference import Negatives


def sampled_softmax(
    outputs: Tensor,
    rows: Tensor,
    targets: Tensor,
    negatives: Negatives,
    lengths: Tensor,
    **options: Any,
) -> Tensor:
    """`softmax.reference.sampled_softmax`.

    In Triton on a GPU, with the products in autocast's dtype. In C on a CPU for small batches that
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
