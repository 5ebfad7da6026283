"""Chooses between the versions of an operation: the Triton kernel on a GPU where it can run, C for
small batches on a CPU where there is a compiler, the reference in plain torch elsewhere.

For the model this is decided once per batch, with its plan: the operations around the attention
run where the attention runs. For a table it depends on device, dtype and width alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.attention import native_plan
from freescale.kernels.attention import plan as attention_plan
from freescale.kernels.attention import reference as attention
from freescale.kernels.attention import triton as triton_attention
from freescale.kernels.attention import triton_plan as triton_attention_plan
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.checksums import native as native_checksums
from freescale.kernels.checksums import reference as checksums
from freescale.kernels.draws import reference as draws
from freescale.kernels.draws import triton as triton_draws
from freescale.kernels.id_map import reference as id_map
from freescale.kernels.id_map import triton as triton_id_map
from freescale.kernels.jit.launch import is_recording
from freescale.kernels.layer import native as native_layer
from freescale.kernels.layer import reference as layer
from freescale.kernels.layer import triton as triton_layer
from freescale.kernels.layer import triton_fused as fused_layer
from freescale.kernels.marks import native as native_marks
from freescale.kernels.marks import reference as marks
from freescale.kernels.positions import native as native_positions
from freescale.kernels.positions import reference as positions
from freescale.kernels.positions import triton as triton_positions
from freescale.kernels.requests import native as native_requests
from freescale.kernels.requests import reference as division
from freescale.kernels.requests import reference as unique
from freescale.kernels.requests import triton as triton_division
from freescale.kernels.requests import triton as triton_unique
from freescale.kernels.requests.reference import MarkedRows
from freescale.kernels.row_moves import reference as row_exchange
from freescale.kernels.row_moves import triton as triton_row_exchange
from freescale.kernels.row_sums import reference as rank_sums
from freescale.kernels.row_sums import reference as row_sums
from freescale.kernels.row_sums import triton as triton_rank_sums
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.row_updates import native as native_updates
from freescale.kernels.row_updates import reference as row_updates
from freescale.kernels.row_updates import triton as triton_row_updates
from freescale.kernels.rows import reference as rows
from freescale.kernels.rows import triton as triton_rows
from freescale.kernels.rows.gradients import RowGradients
from freescale.kernels.softmax import native as native_softmax
from freescale.kernels.softmax import reference as softmax
from freescale.kernels.softmax import triton as triton_softmax
from freescale.kernels.softmax.reference import Negatives
from freescale.kernels.summary_attention import reference as summary_attention
from freescale.kernels.summary_attention import triton as triton_summary_attention


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_on_gpu(x: Tensor) -> bool:
    """Where launches are recorded, the versions for a GPU are wanted whatever the device."""
    return x.is_cuda or is_recording()


def plan_attention(
    lengths: Tensor,
    heads: int,
    *,
    widths: tuple[int, int],
    dtype: torch.dtype,
    buckets: int = 0,
    **options: Any,
) -> AttentionPlan | TilePlan:
    """Plans the attention for the version that fits.

    Args:
        lengths: [samples] int64, candidates included.
        heads: Number of heads.
        widths: (d_qk, d_v) of a head.
        dtype: What q, k and v will have.
        buckets: Of the time bias; 0 without one.
        options: As in `plan_attention` of both versions.
    """
    fits = fits_triton_attention(_is_on_gpu(lengths), has_triton(), widths, dtype, buckets)
    if fits:
        make = partial(
            triton_attention_plan.plan_attention, lengths, heads, buckets=buckets, **options
        )
        host = options.get("host")
        if host is not None and host.plans is not None:
            key = heads, widths, dtype, buckets
            plan: TilePlan = host.plans.find(key, make, options.get("timestamps"))
            return plan
        return make()
    listed = native_layer.LISTED_SCORES if native_layer.is_there(lengths, dtype) else None
    if listed is not None:
        few = native_plan.plan_attention(lengths, heads, listed, buckets=buckets, **options)
        if few is not None:
            return few
    return attention_plan.plan_attention(
        lengths, heads, buckets=buckets, listed_scores=listed, **options
    )


def fits_triton_attention(
    gpu: bool, triton: bool, widths: tuple[int, int], dtype: torch.dtype, buckets: int = 0
) -> bool:
    """Whether the Triton attention can run.

    Args:
        gpu: Whether the tensors lie on a GPU.
        triton: Whether Triton is installed.
        widths: (d_qk, d_v) of a head.
        dtype: Of q, k and v.
        buckets: Of the time bias; 0 without one.
    """
    fits = (
        all(triton_attention.find_kernel_width(width, dtype) is not None for width in widths)
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
    """`reference.attention.hstu_attention`, in the version that the plan is for."""
    if isinstance(plan, TilePlan):
        return triton_attention.hstu_attention(q, k, v, lengths, plan=plan, **options)
    return attention.hstu_attention(q, k, v, lengths, plan=plan, **options)


def attend_to_summaries(plan: AttentionPlan | TilePlan, *inputs: Any, **options: Any) -> Tensor:
    """`reference.summary_attention.summary_attention`, in the version that `plan` is for."""
    if isinstance(plan, TilePlan):
        return triton_summary_attention.summary_attention(*inputs, **options)
    return summary_attention.summary_attention(*inputs, **options)


def add_positions(
    plan: AttentionPlan | TilePlan,
    x: Tensor,
    position: Tensor,
    keys: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`reference.positions.add_positions`, in the version that `plan` and x are for."""
    if (
        isinstance(plan, TilePlan)
        and plan.tokens
        and _fits_triton_layer(plan, x)
        and position.dtype in triton_layer.DTYPES
    ):
        return triton_positions.add_positions(x, position, plan, keys, **options)
    inputs = x, position, plan.lengths, plan.candidate_counts, keys
    if native_layer.fits(plan, x, position.dtype):
        return native_positions.add_positions(*inputs, **options)
    return positions.add_positions(*inputs, **options)


def layer_norm(plan: AttentionPlan | TilePlan, x: Tensor, *parameters: Any) -> Tensor:
    """`reference.layer.layer_norm`, in the version that `plan` and x are for."""
    if _fits_triton_layer(plan, x):
        return triton_layer.layer_norm(x, *parameters)
    return layer.layer_norm(x, *parameters)


def silu_split(
    plan: AttentionPlan | TilePlan, x: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """`reference.layer.silu_split`, in the version that `plan` and x are for."""
    if _fits_triton_layer(plan, x, widest=None):
        return triton_layer.silu_split(x, sizes)
    return layer.silu_split(x, sizes)


def gated_norm(
    plan: AttentionPlan | TilePlan, x: Tensor, gate: Tensor, *parameters: Any, **options: Any
) -> Tensor:
    """`reference.layer.gated_norm`, in the version that `plan` and x are for."""
    if _fits_triton_layer(plan, x):
        return triton_layer.gated_norm(x, gate, *parameters, **options)
    return layer.gated_norm(x, gate, *parameters, **options)


def fits_fused_layer(
    plan: AttentionPlan | TilePlan, x: Tensor, gate_width: int, dtype: torch.dtype
) -> bool:
    """Whether `fused_layer`, of Triton or in C, takes whole layers of this batch: x [tokens,
    width], gates `gate_width` wide, products in `dtype`."""
    fits = _fits_triton_layer(plan, x) and gate_width <= triton_layer.MAX_WIDTH
    return (plan.tokens > 0 and fits) or native_layer.fits(plan, x, dtype)


def run_layers(x: Tensor, layers: Sequence[fused_layer.LayerParameters], **options: Any) -> Tensor:
    """`models.HSTULayer` after another, as fused kernels."""
    chosen = fused_layer.LayerOptions(**options)
    if isinstance(chosen.plan, TilePlan):
        return fused_layer.run_layers(x, layers, chosen)
    return native_layer.run_layers(x, layers, chosen)


def _fits_triton_layer(
    plan: AttentionPlan | TilePlan, x: Tensor, widest: int | None = triton_layer.MAX_WIDTH
) -> bool:
    narrow = widest is None or x.shape[1] <= widest
    return isinstance(plan, TilePlan) and x.dtype in triton_layer.DTYPES and narrow


def sampled_softmax(
    outputs: Tensor,
    rows: Tensor,
    targets: Tensor,
    negatives: Negatives,
    lengths: Tensor,
    **options: Any,
) -> Tensor:
    """`reference.sampled_softmax.sampled_softmax`; in Triton on a GPU, with the products in
    autocast's dtype, in C for small batches that share their negatives and where each token has
    its own."""
    inputs = (outputs, rows, targets, negatives, lengths)
    fits = (
        _is_on_gpu(outputs)
        and has_triton()
        and {outputs.dtype, rows.dtype} <= set(triton_softmax.DTYPES)
        and outputs.shape[1] <= triton_softmax.MAX_WIDTH
    )
    if not fits and native_softmax.fits(outputs, rows, negatives):
        return native_softmax.sampled_softmax(*inputs, **options)
    if not fits:
        return softmax.sampled_softmax(*inputs, **options)
    kind = outputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return triton_softmax.sampled_softmax(*inputs, dtype=dtype, **options)


# ---- table rows


def deduplicate(keys: Tensor, edges: Tensor) -> unique.Unique:
    """`reference.unique.deduplicate`, in Triton on a GPU, in C on a CPU."""
    if _is_on_gpu(keys) and has_triton():
        return triton_unique.deduplicate(keys, edges)
    if native_requests.is_there(keys):
        return native_requests.deduplicate(keys, edges)
    return unique.deduplicate(keys, edges)


def collision_masks(current: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.unique.collision_masks`, in Triton on a GPU, in C on a CPU."""
    if _is_on_gpu(current) and has_triton():
        return triton_unique.collision_masks(current, following)
    if native_requests.is_there(current):
        return native_requests.collision_masks(current, following)
    return unique.collision_masks(current, following)


def tag_rows(lists: Sequence[MarkedRows]) -> Tensor:
    """`reference.division.tag_rows`, in Triton on a GPU."""
    if _is_on_gpu(lists[0].rows) and has_triton():
        return triton_division.tag_rows(lists)
    return division.tag_rows(lists)


def sum_in_order(parts: Tensor, copies: int) -> Tensor:
    """`reference.rank_sums.sum_in_order`, in Triton on a GPU."""
    if _is_on_gpu(parts) and has_triton() and parts.dtype in triton_rank_sums.DTYPES:
        return triton_rank_sums.sum_in_order(parts, copies)
    return rank_sums.sum_in_order(parts, copies)


def _fits_triton_rows(table: Tensor, dtypes: tuple[torch.dtype, ...] = triton_rows.DTYPES) -> bool:
    return (
        _is_on_gpu(table)
        and has_triton()
        and table.dtype in dtypes
        and 1 <= table.shape[1] <= triton_rows.MAX_WIDTH
    )


def choose_optimizers(weight: Tensor) -> Any:
    """Chooses the module whose sgd, adagrad, rowwise_adagrad, adam and clip_rows update this
    table."""
    if _fits_triton_rows(weight, (torch.float32,)):
        return triton_row_updates
    return native_updates if native_updates.fits(weight) else row_updates


def gather_rows(weight: Tensor, numbers: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`reference.rows.gather_rows`: weight [n, width], numbers [r] -> [r, width]."""
    if _fits_triton_rows(weight):
        return triton_rows.gather_rows(weight, numbers, dtype)
    return rows.gather_rows(weight, numbers, dtype)


def choose_id_map(device: torch.device) -> Any:
    """Chooses the module whose functions keep the ids of a dynamic table on this device."""
    on_gpu = device.type == "cuda" or is_recording()
    return triton_id_map if on_gpu and has_triton() else id_map


def choose_draws(device: torch.device) -> Any:
    """The version of kernels/draws/reference.py for sums on a device."""
    on_gpu = device.type == "cuda" or is_recording()
    return triton_draws if on_gpu and has_triton() else draws


def choose_marks(device: torch.device) -> Any:
    """The version of kernels/marks/reference.py for marks on a device."""
    return native_marks if native_marks.is_there(device) else marks


def choose_checksums() -> Any:
    """The version of kernels/checksums/reference.py for this process."""
    return native_checksums if native_checksums.is_there() else checksums


def choose_row_exchange(weight: Tensor) -> Any:
    """Chooses the module whose `swap_rows` exchanges rows of this table, and of its state."""
    return triton_row_exchange if fits_exchange(weight) else row_exchange


def fits_exchange(weight: Tensor) -> bool:
    """Whether `triton.row_exchange` draws and exchanges rows of this table."""
    return _fits_triton_rows(weight, (torch.float32,))


def keeps_gradients(table: Tensor) -> bool:
    """Whether `read_rows` can leave the gradients of a table's rows to `RowGradients`."""
    return choose_optimizers(table) is triton_row_updates


def read_rows(
    table: Tensor, index: Tensor, gradients: RowGradients | None = None, part: int | None = None
) -> Tensor:
    """table [u, width], index [...] into it -> [..., width]. With `gradients`, which needs
    `keeps_gradients`, backward leaves them there, as those of a part."""
    if _fits_triton_rows(table):
        return triton_rows.read_rows(table, index, gradients, part)
    assert gradients is None
    return torch.nn.functional.embedding(index, table)


def sum_by_row(values: Tensor, numbers: Tensor, count: int, onto: Tensor | None = None) -> Tensor:
    """`reference.row_sums.sum_by_row`: values [n, width] of rows [n] -> [count, width]."""
    if _fits_triton_rows(values):
        return triton_row_sums.sum_by_row(values, numbers.to(torch.int32), count, onto)
    return row_sums.sum_by_row(values, numbers, count, onto)


def sum_sorted(numbers: SortedRows, values: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.row_sums.sum_sorted`. Where the optimizers skip rows of -1, these stand between
    the unique ones, so that nothing is read from the device."""
    if choose_optimizers(values) is triton_row_updates:
        return triton_row_sums.sum_sorted(numbers, values)
    return row_sums.sum_sorted(numbers, values)


def sum_duplicates(numbers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.rows.sum_duplicates`. Where the optimizers skip rows of -1, these fill the end, so
    that nothing is read from the device."""
    return group_duplicates(numbers, gradients)(gradients)


def group_duplicates(numbers: Tensor, like: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`sum_duplicates` in two steps: groups now, and returns a function that sums gradients which
    are `like` this tensor."""
    if choose_optimizers(like) is triton_row_updates:
        return triton_rows.group_duplicates(numbers, cut=False)
    summed = native_requests.group_duplicates(numbers) if native_updates.fits(like) else None
    return summed or rows.group_duplicates(numbers)


def put_rows(into: Tensor, places: Tensor, values: Tensor) -> None:
    """into[places] = values: places [n], different ones; values [n, width]."""
    if native_updates.fits(into) and places.dtype == torch.int32 and into.dtype == values.dtype:
        native_requests.put_rows(into, places, values)
    else:
        into.index_copy_(0, places.long(), values.to(into.dtype))


def select_marked_rows(marks: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """marks [n] and gradients [n, width] of all rows -> numbers of the marked rows, and their
    gradients; where that saves a read, all n rows with a number of -1 for those not marked."""
    if choose_optimizers(gradients) is triton_row_updates:
        every = torch.arange(marks.numel(), device=marks.device)
        return torch.where(marks > 0, every, -1), gradients
    numbers = marks.nonzero().squeeze(1)
    return numbers, gradients.index_select(0, numbers)
