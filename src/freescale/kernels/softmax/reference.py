"""The sampled softmax over jagged samples, without ever holding all logits, in plain torch.

A token's output x is scored against the row y of its target and the rows of its negatives:
    score(y) = x.y / temperature - log_q(y)         with normalize, of x / |x| and y / |y|
The caller does not gather rows: it passes each once, in [u, width], with targets and negatives as
indices into them. Different indices mean different items: a negative with the target's index is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from freescale.batch import concat_ranges
from freescale.kernels.groups import Groups

BUDGET = 1 << 18  # elements of logits and of gathered rows at a time: about a core's cache
# The fewest tokens at a time that share their negatives: a product with fewer reads its other
# factor for little work.
FEWEST_SHARING = 64
SMALLEST_NORM = 1e-12  # as in torch.nn.functional.normalize

Per = Literal["sample", "position", "batch"]


@dataclass(frozen=True)
class Negatives:
    """The rows that a token's target competes with."""

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
    host_lengths: Tensor | None = None,  # the lengths on the CPU; None: read from the device
    weights: Tensor | None = None,  # [tokens]
    targets_log_q: Tensor | None = None,  # [tokens]
) -> Tensor:
    """Sum over tokens of weight * -log(softmax of the target among target and negatives).

    Computes in float32, or in float64 if `outputs` or `rows` are. Computes the gradients of both
    together with the loss, tile by tile, and never keeps a [tokens, K].
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
    outputs: Tensor, rows: Tensor, targets: Tensor, negatives: Negatives, lengths: Tensor,
    weights: Tensor | None, targets_log_q: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError for shapes that do not fit each other."""
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
    """n groups of tokens, padded to one length, each with its own K negatives."""

    pad: Callable[[Tensor], Tensor]  # [tokens, ...] -> [n, length, ...]
    put: Callable[[Tensor, Tensor], None]  # (into [tokens, ...], [n, length, ...])
    select: Callable[[Tensor], Tensor]  # K per token, per sample or of the batch -> [n, K]


def _cut_tiles(problem: _Problem, width: int) -> Iterator[_Tile]:
    """Yields tiles whose logits and gathered rows stay within the budget."""
    negatives = problem.negatives
    tokens, count = problem.targets.numel(), negatives.count
    if negatives.per == "sample":
        cost = lambda length: length.clip(min=width) * count  # noqa: E731
        host = problem.host_lengths.numpy()
        for group in Groups.of(problem.lengths, cost, BUDGET, host).groups:
            yield _Tile(group.pad, group.put, lambda x, own=group.samples: x.index_select(0, own))  # type: ignore[misc]
        return
    shared = negatives.per == "batch"
    step = max(FEWEST_SHARING, BUDGET // count) if shared else max(1, BUDGET // (count * width))
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
            shared = None
            if problem.negatives.per == "batch" and outputs.shape[0]:
                shared = _Others.gather(rows, problem.negatives.index[None], problem, dtype)
            for tile in _cut_tiles(problem, outputs.shape[1]):
                _compute_tile(tile, outputs, rows, problem, loss, grads, shared)
            if shared is not None and shared.grad is not None and grads is not None:
                shared.add_gradient(grads[1], shared.grad)
        if grads is not None:
            ctx.save_for_backward(*grads)
        ctx.dtypes = outputs.dtype, rows.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((part * grad).to(dtype) for part, dtype in saved), None, None


@dataclass
class _Others:
    """The gathered rows of the negatives, of one tile or of all tiles that share them."""

    index: Tensor  # [n, K]
    rows: Tensor  # [n, K, width], of unit length with normalize
    scale: Tensor | None  # [n, K] 1 / their norms
    grad: Tensor | None = None  # [n, K, width] of the unit rows, summed over the tiles so far

    @staticmethod
    def gather(rows: Tensor, index: Tensor, problem: _Problem, dtype: torch.dtype) -> _Others:
        others = _gather(rows, index, dtype)
        if not problem.normalize:
            return _Others(index, others, None)
        scale = _invert_norms(others)
        return _Others(index, others * scale[..., None], scale)

    @cached_property
    def order(self) -> tuple[Tensor, Tensor]:
        """(sorted indices [K] of one list, their places in it [K])."""
        ordered, order = self.index[0].sort(stable=True)
        return ordered, order

    def add_gradient(self, into: Tensor, grad: Tensor) -> None:
        """Adds the gradient of the rows, from the gradient of the unit rows."""
        if self.scale is not None:
            _differentiate_norm(grad, self.rows, self.scale)
        _add_rows(into, self.index.reshape(-1), grad.view(-1, into.shape[1]))


def _compute_tile(
    tile: _Tile,
    outputs: Tensor,
    rows: Tensor,
    problem: _Problem,
    loss: Tensor,  # [tokens], written
    grads: tuple[Tensor, Tensor] | None,  # of outputs, written, and of rows, added to
    shared: _Others | None,  # with the sum of their gradient
) -> None:
    dtype = loss.dtype
    x = tile.pad(outputs).to(dtype)  # [n, length, width]
    goal = tile.pad(problem.targets)  # [n, length]
    y = _gather(rows, goal, dtype)
    index = tile.select(problem.negatives.index)  # [n, K]
    negatives = shared or _Others.gather(rows, index, problem, dtype)
    others = negatives.rows
    x_scale, y_scale = (_invert_norms(rows) if problem.normalize else None for rows in (x, y))
    if x_scale is not None and y_scale is not None:
        x, y = x * x_scale[..., None], y * y_scale[..., None]
    positive = (x * y).sum(2)  # [n, length]
    own = positive / problem.temperature
    if problem.targets_log_q is not None:
        own = own - tile.pad(problem.targets_log_q)
    # [n, length, K], the largest tensor: every operation on it counts
    logits = torch.bmm(x / problem.temperature, others.transpose(1, 2))
    if problem.negatives.log_q is not None:
        logits.sub_(tile.select(problem.negatives.log_q)[:, None, :])
    _block_targets(logits, goal, negatives)
    top = torch.maximum(logits.amax(2), own)
    shares = logits.sub_(top[..., None]).exp_()
    rest = shares.sum(2)  # [n, length]
    total = (own - top).exp_().add_(rest)
    weights = None if problem.weights is None else tile.pad(problem.weights).to(dtype)
    lost = total.log() + top - own
    tile.put(loss, lost if weights is None else lost * weights)
    if grads is None:
        return
    # The slopes of the loss by products: the softmax without the target, whose slope is minus their
    # sum. Slopes of padding do no harm: its x is 0.
    total *= problem.temperature
    factor = total.reciprocal() if weights is None else weights / total
    slope = rest * factor  # [n, length]
    # The factor of a token's shares is applied to the narrower tensors instead.
    grad_x = torch.bmm(shares, others).mul_(factor[..., None]).sub_(y * slope[..., None])
    grad_y = x * -slope[..., None]
    grad_others = torch.bmm(shares.transpose(1, 2), x * factor[..., None])  # [n, K, width]
    if x_scale is not None and y_scale is not None:
        _differentiate_norm(grad_x, x, x_scale)
        _differentiate_norm(grad_y, y, y_scale)
    tile.put(grads[0], grad_x)
    _add_rows(grads[1], goal.reshape(-1), grad_y.view(-1, grad_y.shape[2]))
    if shared is None:
        negatives.add_gradient(grads[1], grad_others)
    else:
        shared.grad = grad_others if shared.grad is None else shared.grad.add_(grad_others)


def _block_targets(
    logits: Tensor,  # [n, length, K], written
    goal: Tensor,  # [n, length]
    negatives: _Others,
) -> None:
    """Leaves out negatives that are the target."""
    index = negatives.index
    if len(index) > 1 or logits.is_cuda:
        logits.masked_fill_(goal[:, :, None] == index[:, None, :], -torch.inf)
        return
    # One list for all tokens: each target is in it a few times, if at all.
    ordered, order = negatives.order
    first, last = (torch.searchsorted(ordered, goal[0], right=right) for right in (False, True))
    counts = last - first  # [tokens]
    tokens = torch.repeat_interleave(counts)
    places = order.index_select(0, concat_ranges(first, counts))
    logits[0].index_put_((tokens, places), logits.new_tensor(-torch.inf))


def _gather(rows: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """[u, width], [...] -> [..., width]."""
    gathered = rows.index_select(0, index.reshape(-1)).view(*index.shape, rows.shape[1])
    return gathered.to(dtype)


def _differentiate_norm(grad: Tensor, unit: Tensor, inverse: Tensor) -> None:
    """Turns the gradient [..., width] of unit rows, in place, into that of rows with the norms
    1 / `inverse` [...], by removing the part along each row."""
    grad.addcmul_(unit, (grad * unit).sum(-1, keepdim=True), value=-1)
    grad.mul_(inverse[..., None])


def _add_rows(into: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows in a fixed order on every device; on the CPU index_add_ is faster."""
    if into.is_cuda:
        into.index_put_((index,), rows, accumulate=True)
    else:
        into.index_add_(0, index, rows)


def _invert_norms(rows: Tensor) -> Tensor:
    """rows [..., width] -> 1 / their norms [...]."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.clamp_(min=SMALLEST_NORM).reciprocal_()
