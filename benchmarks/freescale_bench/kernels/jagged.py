"""Moves of whole samples of jagged features, in plain torch: permute, dispatch, combine and
transpose.

All four are one thing: runs of elements change places, each exactly once. A plan says which run
goes where; it is made once per batch from lengths on the host, serves every dtype whose features
have the same lengths and shapes, and knows the split sizes of an AllToAll. The way back, and so the
gradient, is the same plan with its sides exchanged.

`freescale bench kernels` measures them: what packing on a device takes (the paper's figure 7).
Training packs on the host, where batches come from (`freescale.batch_codec`).

    permute     features of n samples        -> the same features, samples in another order
    dispatch    features of n samples        -> one message: for each rank, feature by feature,
                                                the samples that go there
    combine     messages of all ranks        -> features, samples in rank order
    transpose   features, one after another  -> one tensor: sample by sample, feature by feature

Per-sample columns are features of length 1. A two-level feature is three: counts (length 1),
lengths, values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.upload import upload

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """The tensors before or after a move."""

    rows: tuple[int, ...]  # leading size of each
    shapes: tuple[Shape, ...]  # trailing shape of each

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Elements of a row, tensor by tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rows * width for rows, width in zip(self.rows, self.widths, strict=True))


@dataclass(frozen=True)
class Move:
    """Runs of elements, in the order of the target."""

    source: Side
    target: Side
    lengths: np.ndarray  # [runs] elements, none is 0
    taken: np.ndarray  # [runs, 2]: tensor of the source, first element there
    put: np.ndarray  # [runs, 2]: tensor of the target, first element there
    unit: int  # elements that always move together: what all rows' widths are multiples of
    splits: tuple[int, ...] = ()  # elements that go to, or come from, each rank
    kept: dict[Any, Any] = field(default_factory=dict)  # what executing it needs on a device

    @cached_property
    def inverse(self) -> Move:
        order = np.lexsort((self.taken[:, 1], self.taken[:, 0]))
        return Move(
            self.target,
            self.source,
            self.lengths[order],
            self.put[order],
            self.taken[order],
            self.unit,
            self.splits,
        )


def plan_permute(
    lengths: Tensor | np.ndarray, order: Tensor | np.ndarray, shapes: Sequence[Shape] | None = None
) -> Move:
    """lengths [features, samples]; order [samples]: which sample comes first, second, ..., each
    once."""
    table, shapes = _lengths(lengths, shapes)
    chosen = _order(order, table.shape[1])
    side = Side(tuple(table.sum(1).tolist()), shapes)
    runs, starts = _runs(table, side, chosen)
    put = np.cumsum(runs, axis=1) - runs
    return _move(side, side, runs, starts, np.stack([_numbers(runs), put], axis=2))


def plan_dispatch(
    lengths: Tensor | np.ndarray,
    order: Tensor | np.ndarray,
    counts: Sequence[int] | Tensor | np.ndarray,
    shapes: Sequence[Shape] | None = None,
) -> Move:
    """lengths [features, samples]; counts [ranks]: how many of the samples at `order` go to each
    rank, one rank after another."""
    table, shapes = _lengths(lengths, shapes)
    numbers = _counts(counts, table.shape[1])
    rank = np.repeat(np.arange(len(numbers)), numbers)
    return _message(table, _order(order, table.shape[1]), rank, len(numbers), shapes)


def plan_combine(
    lengths: Tensor | np.ndarray,
    counts: Sequence[int] | Tensor | np.ndarray,
    shapes: Sequence[Shape] | None = None,
) -> Move:
    """lengths [features, samples] of what came, in rank order; counts [ranks]: how many samples
    came from each rank."""
    table, shapes = _lengths(lengths, shapes)
    numbers = _counts(counts, table.shape[1])
    rank = np.repeat(np.arange(len(numbers)), numbers)
    return _message(table, np.arange(table.shape[1]), rank, len(numbers), shapes).inverse


def plan_transpose(lengths: Tensor | np.ndarray, shapes: Sequence[Shape] | None = None) -> Move:
    """lengths [features, samples]. Its inverse goes from sample-major back to features."""
    table, shapes = _lengths(lengths, shapes)
    samples = np.arange(table.shape[1])
    return _message(table, samples, samples, len(samples), shapes)


def move(values: Sequence[Tensor], plan: Move) -> list[Tensor]:
    """The tensors of the plan's source -> those of its target. Differentiable; one dtype, any."""
    check_values(values, plan)
    unit, device = plan.unit, values[0].device
    flat = torch.cat([value.reshape(-1, unit) for value in values])
    first = np.cumsum([0, *plan.source.sizes])[plan.taken[:, 0]] + plan.taken[:, 1]
    lengths = plan.lengths // unit
    shift, lengths = upload(
        np.stack([first // unit - np.cumsum(lengths) + lengths, lengths]), device
    )
    total = flat.shape[0]
    index = torch.arange(total, device=device) + torch.repeat_interleave(
        shift, lengths, output_size=total
    )
    pieces = flat.index_select(0, index).flatten().split(list(plan.target.sizes))  # type: ignore[no-untyped-call]
    shapes = zip(plan.target.rows, plan.target.shapes, strict=True)
    return [piece.view(rows, *shape) for piece, (rows, shape) in zip(pieces, shapes, strict=True)]


def check_values(values: Sequence[Tensor], plan: Move) -> None:
    """Whether these are tensors of the plan's source: shapes, one dtype, one device."""
    side = plan.source
    if len(values) != len(side.rows):
        raise ValueError(f"the plan moves {len(side.rows)} tensors, not {len(values)}")
    for number, (value, rows, shape) in enumerate(zip(values, side.rows, side.shapes, strict=True)):
        if tuple(value.shape) != (rows, *shape):
            raise ValueError(
                f"tensor {number} must be {[rows, *shape]} as its lengths add up, "
                f"not {list(value.shape)}"
            )
    if len({value.dtype for value in values}) > 1:
        raise ValueError(
            "tensors of one move share a dtype, not "
            f"{sorted({str(value.dtype) for value in values})}"
        )
    if len({value.device for value in values}) > 1:
        raise ValueError(
            f"tensors lie on different devices: {[str(value.device) for value in values]}"
        )


def _message(
    table: np.ndarray, order: np.ndarray, group: np.ndarray, groups: int, shapes: tuple[Shape, ...]
) -> Move:
    """From features to one message: group by group (of the samples at `order`, rising), feature by
    feature."""
    side = Side(tuple(table.sum(1).tolist()), shapes)
    runs, starts = _runs(table, side, order)
    places = np.argsort(np.broadcast_to(group, runs.shape), axis=None, kind="stable")
    behind = np.cumsum(runs.ravel()[places])
    put = np.empty(runs.size, np.int64)
    put[places] = behind - runs.ravel()[places]
    message = Side((int(runs.sum()),), ((),))
    splits = np.bincount(
        np.broadcast_to(group, runs.shape).ravel(), weights=runs.ravel(), minlength=groups
    )
    put = np.stack([np.zeros_like(runs), put.reshape(runs.shape)], axis=2)
    return _move(side, message, runs, starts, put, tuple(int(n) for n in splits))


def _runs(table: np.ndarray, side: Side, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements of the samples at `order` [features, samples] and where they are [features, samples,
    2]."""
    widths = np.array(side.widths, np.int64).reshape(-1, 1)
    starts = (np.cumsum(table, axis=1) - table) * widths
    runs = table[:, order] * widths
    return runs, np.stack([_numbers(runs), starts[:, order]], axis=2)


def _numbers(runs: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(len(runs))[:, None], runs.shape)


def _move(
    source: Side,
    target: Side,
    runs: np.ndarray,
    taken: np.ndarray,
    put: np.ndarray,
    splits: Shape = (),
) -> Move:
    there = np.flatnonzero(runs.ravel())
    lengths, taken, put = (
        runs.ravel()[there],
        taken.reshape(-1, 2)[there],
        put.reshape(-1, 2)[there],
    )
    order = np.lexsort((put[:, 1], put[:, 0]))
    return Move(
        source, target, lengths[order], taken[order], put[order], math.gcd(*source.widths), splits
    )


def _host(values: Any, name: str) -> np.ndarray:
    """Integers as int64 on the host. Reads the device if they lie there."""
    if isinstance(values, Tensor) and values.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, not {values.dtype}")
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, not {array.dtype}")
    return array.astype(np.int64)


def _lengths(lengths: Any, shapes: Sequence[Shape] | None) -> tuple[np.ndarray, tuple[Shape, ...]]:
    table = _host(lengths, "lengths")
    if table.ndim != 2 or not table.shape[0]:
        raise ValueError(
            f"lengths must be [features, samples], with a feature or more, not {list(table.shape)}"
        )
    if (table < 0).any():
        raise ValueError(f"lengths must be 0 or more, not {table.min()}")
    shapes = tuple(tuple(shape) for shape in shapes) if shapes is not None else ((),) * len(table)
    if len(shapes) != len(table):
        raise ValueError(f"{len(table)} features have lengths, {len(shapes)} have shapes")
    if any(size < 1 for shape in shapes for size in shape):
        raise ValueError(f"trailing sizes must be 1 or more: {shapes}")
    return table, shapes


def _order(order: Any, samples: int) -> np.ndarray:
    chosen = _host(order, "order")
    if chosen.shape != (samples,) or not np.array_equal(np.sort(chosen), np.arange(samples)):
        raise ValueError(
            f"order must name each of the {samples} samples once; got "
            f"{list(chosen.shape)}, {chosen[:8]}..."
        )
    return chosen


def _counts(counts: Any, samples: int) -> np.ndarray:
    numbers = _host(counts, "counts")
    if numbers.ndim != 1 or (numbers < 0).any() or numbers.sum() != samples:
        raise ValueError(
            f"counts must be 0 or more and add up to {samples} samples; they add up "
            f"to {numbers.sum()}"
        )
    return numbers
