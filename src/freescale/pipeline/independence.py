"""Does what a model computes for a sample depend on the other samples of its batch? Balancing moves
samples from batch to batch, and would change what such a model trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from freescale.batch import SequenceBatch, check_is_batch
from freescale.embedding.sharded_model import ShardedModel, evaluation_mode
from freescale.pipeline.first_batch import check_losses, refuse_batch_norm, unchanged

# relative to the losses: what other shapes of the same products may differ by
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_LOW = 2e-2
_SMALLEST = 1e-6  # losses below are compared as if they were this large

Calls = list[tuple[str, list[Tensor]]]  # (name of the submodule, tensors that it returned)

_DEPENDENT = (
    "samples depend on each other: task {task!r} has the losses {first:.6g} and {second:.6g} for "
    "samples {i} and {j} alone, and {both:.6g} for the two together. {culprit}. Do not balance "
    "this model, or let a sample's result depend on nothing but the sample (layer norm instead of "
    "batch norm, attention divided by a fixed length)"
)


def check_samples_independent(
    model: nn.Module | ShardedModel, batch: SequenceBatch, *, samples: int = 8
) -> None:
    """Computes samples alone and together with another, and says what differs. Nothing is trained,
    and the model is left as it was; where it is random (dropout), evaluation mode is compared.

    Args:
        model: returns a summed loss per task. What `parallelize` returned makes this a collective.
        batch: at least two samples; long ones next to short ones show the most.
        samples: how many of them are looked at: the longest, the shortest and some between.

    Raises:
        ValueError: samples depend on each other; the message names the first module whose output
            for a sample is another in company. Or the batch has fewer than two supervised samples.
    """
    if isinstance(model, ShardedModel):
        with model.reading(batch) as fetched:
            _check(model.module, fetched, samples)
    else:
        with torch.no_grad():
            _check(model, check_is_batch(batch), samples)


def _check(module: nn.Module, batch: SequenceBatch, samples: int) -> None:
    refuse_batch_norm(module)
    chosen = _choose_samples(batch, samples)
    with unchanged(module):
        pair = batch.select(chosen[:2])
        is_random = _compute(module, pair) != _compute(module, pair)
        with evaluation_mode(module) if is_random else nullcontext():
            # the longest with the shortest, and so on inwards
            for i, j in zip(chosen.tolist()[0::2], chosen.tolist()[1::2]):
                _compare(module, batch, i, j)


def _choose_samples(batch: SequenceBatch, samples: int) -> Tensor:
    """Numbers of supervised samples: the longest, the shortest, the longest but one ..."""
    supervised = torch.stack([weight > 0 for weight in batch.weights.values()]).any(dim=0)
    numbers = supervised.nonzero().view(-1)
    if numbers.numel() < 2:
        raise ValueError(
            f"the batch has {numbers.numel()} supervised samples: give it at least two"
        )
    lengths = torch.zeros(len(batch), dtype=torch.int64, device=numbers.device)
    for sequence in batch.sequences.values():
        lengths = lengths + sequence.lengths
    order = numbers[lengths[numbers].argsort(stable=True)]
    half = max(1, min(samples, order.numel()) // 2)
    return torch.stack([order.flip(0)[:half], order[:half]], dim=1).view(-1)


def _compute(module: nn.Module, batch: SequenceBatch) -> dict[str, tuple[float, torch.dtype]]:
    losses = check_losses(module(batch), sorted(batch.weights))
    return {task: (float(loss), loss.dtype) for task, loss in losses.items()}


def _compare(module: nn.Module, batch: SequenceBatch, i: int, j: int) -> None:
    device = batch.device
    one, other, both = (
        batch.select(torch.tensor(which, device=device)) for which in ([i], [j], [i, j])
    )
    with _record_outputs(module) as of_first:
        first = _compute(module, one)
    with _record_outputs(module) as of_second:
        second = _compute(module, other)
    with _record_outputs(module) as of_both:
        joint = _compute(module, both)
    for task, (value, dtype) in joint.items():
        apart = first[task][0] + second[task][0]
        scale = max(abs(value), abs(first[task][0]) + abs(second[task][0]), _SMALLEST)
        tolerance = _TOLERANCE.get(dtype, _TOLERANCE_LOW)
        if abs(value - apart) > tolerance * scale:
            raise ValueError(
                _DEPENDENT.format(
                    task=task,
                    first=first[task][0],
                    second=second[task][0],
                    both=value,
                    i=i,
                    j=j,
                    culprit=_find_culprit(module, of_first, of_second, of_both, tolerance),
                )
            )


@contextmanager
def _record_outputs(module: nn.Module) -> Iterator[Calls]:
    """What each call of a submodule returns, in order of time."""
    calls: Calls = []

    def record(name: str) -> Any:
        return lambda _, __, output: calls.append(
            (name, [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
        )

    handles = [
        part.register_forward_hook(record(name)) for name, part in module.named_modules() if name
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _find_culprit(
    module: nn.Module, first: Calls, second: Calls, both: Calls, tolerance: float
) -> str:
    """The first call whose output for one of two samples differs. The parts of a tensor that belong
    to them are its first and its last rows: as many as there are of each sample alone."""
    for (name, ones), (_, others), (_, pairs) in zip(first, second, both):
        for one, other, pair in zip(ones, others, pairs):
            if not pair.is_floating_point() or not one.dim() == other.dim() == pair.dim() > 0:
                continue
            apart = torch.cat([one, other]) if one.shape[1:] == other.shape[1:] else one
            if apart.shape != pair.shape or not pair.numel():
                continue
            difference = float((apart - pair).abs().max())
            if difference > tolerance * max(float(apart.abs().max()), _SMALLEST):
                kind = type(module.get_submodule(name)).__name__
                return (
                    f"The first module whose output differs is {name!r} ({kind}), by "
                    f"{difference:.3g}: look at it and at what it is given"
                )
    return "The outputs of all submodules agree: look at the model's own forward, and its loss"
