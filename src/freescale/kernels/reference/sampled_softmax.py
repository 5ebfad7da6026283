"""Sampled softmax over jagged samples, whose logits never exist all at once, in plain torch.

A token's output x is scored against the row y of its target and the rows of its negatives:
    score(y) = x.y / temperature - log_q(y)         with normalize, of x / |x| and y / |y|
Rows are never gathered by the caller: all arrive once, as [u, width], and targets and negatives are
indices into them. Different indices mean different items: a negative with the target's index counts
as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from freescale.kernels.groups import Groups

BUDGET = 1 << 18  # elements at a time, of logits and of gathered rows: about a core's cache
SMALLEST_NORM = 1e-12  # as in torch.nn.functional.normalize

Per = Literal["sample", "position", "batch"]


@dataclass(frozen=True)
class Negatives:
    """Which rows a token's target competes with."""

    index: Tensor  # int64; per sample [samples, K], per position [tokens, K], per batch [K]
    per: Per
    # [as index] float32: log of the expected count or probability of each draw
    log_q: Tensor | None = None

    @property
    def count(self) -> int:
        return self.index.shape[-1]


def sampled_softmax(
    outputs: Tensor,  # [tokens, width]
    rows: Tensor,  # [u, width]
    targets: Tensor,  # [tokens] int64: indices into rows
    negatives: Negatives,
    lengths: Tensor,  # [samples] int64
    *,
    temperature: float,
    normalize: bool,
    host_lengths: Tensor | None = None,  # the same on the CPU; else they are read
    weights: Tensor | None = None,  # [tokens]
    targets_log_q: Tensor | None = None,  # [tokens]
) -> Tensor:
    """Sum over tokens of weight * -log(softmax of the target among target and negatives).

    Computes in float32, or in float64 if one of outputs and rows is. Gradients of `outputs` and
    `rows` are made together with the loss, a tile at a time, so that no [tokens, K] is ever kept.
    """
    check_inputs(outputs, rows, targets, negatives, lengths, weights, targets_log_q)
    host = lengths.cpu() if host_lengths is None else host_lengths
    total: Tensor = _SampledSoftmax.apply(  # type: ignore[no-untyped-call]
        outputs,
        rows,
        _Problem(targets, negatives, lengths, host, weights, targets_log_q, temperature, normalize),
        torch.is_grad_enabled() and (outputs.requires_grad or rows.requires_grad),
    )
    return total


def check_inputs(
    outputs: Tensor,
    rows: Tensor,
    targets: Tensor,
    negatives: Negatives,
    lengths: Tensor,
    weights: Tensor | None,
    targets_log_q: Tensor | None,
) -> None:
    """Refuses shapes that do not fit each other, before anything is computed."""
    tokens = targets.numel()
    if outputs.ndim != 2 or rows.ndim != 2 or outputs.shape != (tokens, rows.shape[1]):
        raise ValueError(
            f"outputs must be [{tokens} tokens, width] and rows [u, width], not "
            f"{list(outputs.shape)} and {list(rows.shape)}"
        )
    before: dict[Per, tuple[int, ...]] = {
        "sample": (lengths.numel(),),
        "position": (tokens,),
        "batch": (),
    }
    index = negatives.index
    if index.ndim < 1 or index.shape[:-1] != before[negatives.per] or index.shape[-1] < 1:
        expected = ", ".join([*map(str, before[negatives.per]), "K"])
        raise ValueError(
            f"negatives per {negatives.per} must be [{expected}] with K at least 1, not "
            f"{list(index.shape)}"
        )
    for name, column, shape in (
        ("negatives' log_q", negatives.log_q, index.shape),
        ("weights", weights, (tokens,)),
        ("targets' log_q", targets_log_q, (tokens,)),
    ):
        if column is not None and column.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, not {list(column.shape)}")


class _Problem(NamedTuple):
    targets: Tensor
    negatives: Negatives
    lengths: Tensor
    host_lengths: Tensor
    weights: Tensor | None
    targets_log_q: Tensor | None
    temperature: float
    normalize: bool


@dataclass(frozen=True)
class _Tile:
    """n groups of tokens, padded to some length, each with K negatives of its own."""

    pad: Callable[[Tensor], Tensor]  # [tokens, ...] -> [n, length, ...]
    put: Callable[[Tensor, Tensor], None]  # (into [tokens, ...], [n, length, ...])
    select: Callable[[Tensor], Tensor]  # of each token's, sample's or the batch's K -> [n, K]


def _cut_tiles(problem: _Problem, width: int) -> Iterator[_Tile]:
    """Tiles whose logits and gathered rows stay within the budget."""
    negatives = problem.negatives
    tokens, count = problem.targets.numel(), negatives.count
    if negatives.per == "sample":
        cost = lambda length: length.clip(min=width) * count  # noqa: E731
        host = problem.host_lengths.numpy()
        for group in Groups.of(problem.lengths, cost, BUDGET, host).groups:
            yield _Tile(group.pad, group.put, lambda x, own=group.samples: x.index_select(0, own))  # type: ignore[misc]
        return
    shared = negatives.per == "batch"
    step = max(1, BUDGET // (count if shared else count * width))
    axis = 0 if shared else 1
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        yield _Tile(
            lambda x, part=part: x[part].unsqueeze(axis),  # type: ignore[misc]
            lambda into, x, part=part: into[part].copy_(x.squeeze(axis)),  # type: ignore[misc]
            lambda x, part=part: x[None] if shared else x[part],  # type: ignore[misc]
        )


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, rows, problem, need_grad):  # type: ignore[no-untyped-def]
        dtype = torch.promote_types(torch.promote_types(outputs.dtype, rows.dtype), torch.float32)
        loss = outputs.new_zeros(outputs.shape[0], dtype=dtype)
        grads = None
        if need_grad:
            grads = torch.zeros_like(outputs, dtype=dtype), torch.zeros_like(rows, dtype=dtype)
        with torch.autocast(outputs.device.type, enabled=False):
            for tile in _cut_tiles(problem, outputs.shape[1]):
                _compute_tile(tile, outputs, rows, problem, loss, grads)
        if grads is not None:
            ctx.save_for_backward(*grads)
        ctx.dtypes = outputs.dtype, rows.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((part * grad).to(dtype) for part, dtype in saved), None, None


def _compute_tile(
    tile: _Tile,
    outputs: Tensor,
    rows: Tensor,
    problem: _Problem,
    loss: Tensor,  # [tokens], written
    grads: tuple[Tensor, Tensor] | None,  # of outputs, written, and of rows, added to
) -> None:
    dtype, (width,) = loss.dtype, outputs.shape[1:]
    x = tile.pad(outputs).to(dtype)  # [n, length, width]
    goal = tile.pad(problem.targets)  # [n, length]
    index = tile.select(problem.negatives.index)  # [n, K]
    y, others = (
        rows.index_select(0, i.reshape(-1)).view(*i.shape, width).to(dtype) for i in (goal, index)
    )
    x_scale, y_scale, scale = (
        _invert_norms(rows) if problem.normalize else None for rows in (x, y, others)
    )
    if x_scale is not None and y_scale is not None and scale is not None:
        x, y = x * x_scale[..., None], y * y_scale[..., None]
        others = others * scale[..., None]
    positive = (x * y).sum(2)  # [n, length]
    own = positive / problem.temperature
    if problem.targets_log_q is not None:
        own = own - tile.pad(problem.targets_log_q)
    # [n, length, K], the largest of all: every operation on it counts
    logits = torch.bmm(x / problem.temperature, others.transpose(1, 2))
    if problem.negatives.log_q is not None:
        logits.sub_(tile.select(problem.negatives.log_q)[:, None, :])
    _block_targets(logits, goal, index, rows.shape[0])
    top = torch.maximum(logits.amax(2), own)
    shares = logits.sub_(top[..., None]).exp_()
    rest = shares.sum(2)  # [n, length]
    total = (own - top).exp_().add_(rest)
    weights = None if problem.weights is None else tile.pad(problem.weights).to(dtype)
    lost = total.log() + top - own
    tile.put(loss, lost if weights is None else lost * weights)
    if grads is None:
        return
    # The loss's slopes by products: softmax without the target, whose own is minus their sum. Where
    # padding has some, its x is 0.
    total *= problem.temperature
    factor = total.reciprocal() if weights is None else weights / total
    slope = rest * factor  # [n, length]
    # What scales a token's shares is applied to narrow tensors instead.
    grad_x = torch.bmm(shares, others).mul_(factor[..., None]).sub_(y * slope[..., None])
    grad_y = x * -slope[..., None]
    grad_others = torch.bmm(shares.transpose(1, 2), x * factor[..., None])  # [n, K, width]
    if x_scale is not None and y_scale is not None and scale is not None:
        for grad, unit, inverse in (
            (grad_x, x, x_scale),
            (grad_y, y, y_scale),
            (grad_others, others, scale),
        ):
            # through the norm: what points along the row itself is taken away
            grad.addcmul_(unit, (grad * unit).sum(2, keepdim=True), value=-1)
            grad.mul_(inverse[..., None])
    tile.put(grads[0], grad_x)
    for i, grad in ((goal, grad_y), (index, grad_others)):
        _add_rows(grads[1], i.reshape(-1), grad.view(-1, width))


def _block_targets(
    logits: Tensor,  # [n, length, K], written
    goal: Tensor,  # [n, length]
    index: Tensor,  # [n, K]
    rows: int,  # both are below it
) -> None:
    """A negative that is the target counts as absent."""
    if len(index) > 1 or logits.is_cuda:
        logits.masked_fill_(goal[:, :, None] == index[:, None, :], -torch.inf)
        return
    # One list for all tokens: few of them have their target in it.
    drawn = torch.zeros(rows, dtype=torch.bool).index_fill_(0, index[0], True)
    hit = drawn.index_select(0, goal[0]).nonzero()[:, 0]  # [tokens with one]
    if hit.numel():
        same = goal[0].index_select(0, hit)[:, None] == index
        logits[0].index_put_((hit,), logits[0].index_select(0, hit).masked_fill_(same, -torch.inf))


def _add_rows(into: Tensor, index: Tensor, rows: Tensor) -> None:
    """In an order that is fixed on every device; on the CPU, index_add_ is the faster one."""
    if into.is_cuda:
        into.index_put_((index,), rows, accumulate=True)
    else:
        into.index_add_(0, index, rows)


def _invert_norms(rows: Tensor) -> Tensor:
    """[..., width] -> [...]: 1 / the norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.clamp_(min=SMALLEST_NORM).reciprocal_()
