"""Chooses the version of the operations on requests for rows: Triton on a GPU, C on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.requests import native, reference, triton
from freescale.kernels.requests.reference import MarkedRows, Unique


def deduplicate(keys: Tensor, edges: Tensor) -> Unique:
    """`requests.reference.deduplicate`."""
    if runs_triton(keys.device):
        return triton.deduplicate(keys, edges)
    compute = native.deduplicate if native.is_there(keys) else reference.deduplicate
    return compute(keys, edges)


def collision_masks(current: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """`requests.reference.collision_masks`."""
    if runs_triton(current.device):
        return triton.collision_masks(current, following)
    compute = native.collision_masks if native.is_there(current) else reference.collision_masks
    return compute(current, following)


def tag_rows(lists: Sequence[MarkedRows]) -> Tensor:
    """`requests.reference.tag_rows`, in Triton on a GPU."""
    compute = triton.tag_rows if runs_triton(lists[0].rows.device) else reference.tag_rows
    return compute(lists)


def put_rows(into: Tensor, places: Tensor, values: Tensor) -> None:
    """into[places] = values: places [n], each once; values [n, width]."""
    float32 = into.is_cpu and into.dtype == torch.float32
    same = into.dtype == values.dtype and places.dtype == torch.int32
    if float32 and same and native.is_there(into):
        native.put_rows(into, places, values)
    else:
        into.index_copy_(0, places.long(), values.to(into.dtype))
