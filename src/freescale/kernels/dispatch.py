"""Which of two twins runs: the Triton kernel where it can, the plain-torch reference elsewhere.

For the model decided once per batch, with its plan: what a layer does around the attention runs
where the attention runs. For a table by its device, dtype and width, so always the same way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.reference import attention, layer, rows, summary_attention, unique
from freescale.kernels.reference.attention import AttentionPlan
from freescale.kernels.triton import attention as triton_attention
from freescale.kernels.triton import attention_plan as triton_attention_plan
from freescale.kernels.triton import layer as triton_layer
from freescale.kernels.triton import rows as triton_rows
from freescale.kernels.triton import summary_attention as triton_summary_attention
from freescale.kernels.triton import unique as triton_unique
from freescale.kernels.triton.attention_plan import TilePlan


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def plan_attention(
    lengths: Tensor,
    heads: int,
    *,
    widths: tuple[int, int],
    dtype: torch.dtype,
    buckets: int = 0,
    **options: Any,
) -> AttentionPlan | TilePlan:
    """The plan of the kernel that fits: head widths (d_qk, d_v) and the dtype that q, k and v will
    have."""
    fits = fits_triton_attention(lengths.is_cuda, has_triton(), widths, dtype, buckets)
    plan = triton_attention_plan.plan_attention if fits else attention.plan_attention
    return plan(lengths, heads, buckets=buckets, **options)


def fits_triton_attention(
    gpu: bool, triton: bool, widths: tuple[int, int], dtype: torch.dtype, buckets: int = 0
) -> bool:
    """The rule by which `plan_attention` chooses. `gpu`: the tensors lie on one; `triton`: it is
    installed."""
    fits = (
        all(width in triton_attention.WIDTHS for width in widths)
        and dtype in triton_attention.DTYPES
    )
    return gpu and triton and fits and buckets <= triton_attention_plan.MAX_BUCKETS


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    plan: AttentionPlan | TilePlan,
    **options: Any,
) -> Tensor:
    """As `attention.hstu_attention`, by the kernel that the plan is for."""
    if isinstance(plan, TilePlan):
        return triton_attention.hstu_attention(q, k, v, lengths, plan=plan, **options)
    return attention.hstu_attention(q, k, v, lengths, plan=plan, **options)


def attend_to_summaries(plan: AttentionPlan | TilePlan, *inputs: Any, **options: Any) -> Tensor:
    """As `summary_attention.summary_attention`, where the attention runs."""
    return (
        triton_summary_attention if isinstance(plan, TilePlan) else summary_attention
    ).summary_attention(*inputs, **options)


def layer_norm(plan: AttentionPlan | TilePlan, x: Tensor, *parameters: Any) -> Tensor:
    """As `layer.layer_norm`."""
    return _choose_layer(plan, x).layer_norm(x, *parameters)


def silu_split(
    plan: AttentionPlan | TilePlan, x: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """As `layer.silu_split`."""
    return _choose_layer(plan, x, widest=None).silu_split(x, sizes)


def gated_norm(
    plan: AttentionPlan | TilePlan, x: Tensor, gate: Tensor, *parameters: Any, **options: Any
) -> Tensor:
    """As `layer.gated_norm`."""
    return _choose_layer(plan, x).gated_norm(x, gate, *parameters, **options)


def _choose_layer(
    plan: AttentionPlan | TilePlan, x: Tensor, widest: int | None = triton_layer.MAX_WIDTH
) -> Any:
    fits = x.dtype in triton_layer.DTYPES and (widest is None or x.shape[1] <= widest)
    return triton_layer if isinstance(plan, TilePlan) and fits else layer


# ---- table rows


def deduplicate(keys: Tensor, edges: Tensor) -> unique.Unique:
    return (triton_unique if keys.is_cuda and has_triton() else unique).deduplicate(keys, edges)


def collision_masks(current: Tensor, coming: Tensor) -> tuple[Tensor, Tensor]:
    return (triton_unique if current.is_cuda and has_triton() else unique).collision_masks(
        current, coming
    )


def _fits_triton_rows(table: Tensor, dtypes: tuple[torch.dtype, ...] = triton_rows.DTYPES) -> bool:
    return (
        table.is_cuda
        and has_triton()
        and table.dtype in dtypes
        and 1 <= table.shape[1] <= triton_rows.MAX_WIDTH
    )


def choose_optimizers(weight: Tensor) -> Any:
    """The module whose sgd, adagrad, rowwise_adagrad, adam and clip_rows update this table."""
    return triton_rows if _fits_triton_rows(weight, (torch.float32,)) else rows


def gather_rows(weight: Tensor, numbers: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return (triton_rows if _fits_triton_rows(weight) else rows).gather_rows(weight, numbers, dtype)


def read_rows(table: Tensor, index: Tensor) -> Tensor:
    """table [u, width], index [...] into it -> [..., width]."""
    return (
        triton_rows.read_rows(table, index)
        if _fits_triton_rows(table)
        else torch.nn.functional.embedding(index, table)
    )


def sum_duplicates(numbers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """As `rows.sum_duplicates`. Where the optimizers pass over rows of -1, these fill the end:
    nothing is read from the device."""
    return group_duplicates(numbers, gradients)(gradients)


def group_duplicates(numbers: Tensor, like: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The same, before the gradients are there; they will be `like` this one."""
    return (
        triton_rows.group_duplicates(numbers, cut=False)
        if choose_optimizers(like) is triton_rows
        else rows.group_duplicates(numbers)
    )


def select_marked_rows(marks: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """marks [n] and gradients [n, width] of all rows -> rows that are marked, and theirs; others
    are -1 where that saves a read."""
    if choose_optimizers(gradients) is triton_rows:
        return torch.where(
            marks > 0, torch.arange(marks.numel(), device=marks.device), -1
        ), gradients
    numbers = marks.nonzero().squeeze(1)
    return numbers, gradients.index_select(0, numbers)
