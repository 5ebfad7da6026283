"""A look at the first batch: does the model return sums, and is each sample's part of them its own?

A model that returns means, or whose samples depend on each other, trains without an error and gives
other results on other numbers of ranks. The forward pass of a whole batch is therefore compared
with those of its two halves. Nothing of this is left behind: random states, buffers and attributes
of modules are put back, and there is no backward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.batch import SequenceBatch
from freescale.embedding.sharded_model import evaluation_mode
from freescale.transport.api import Transport
from freescale.transport.failures import failing_together

# relative to the losses: what sums in another order may differ by, attention in tf32 included
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_TOLERANCE_LOW = 2e-2  # bf16 and fp16, autocast included
_SMALLEST = 1e-6  # losses below are compared as if they were this large

_MEAN = (
    "task {task!r}: the loss looks like a mean over the batch ({whole:.6g} for {samples} samples, "
    "{first:.6g} and {second:.6g} for their halves): return sums, and the weights that they are "
    "divided by in `weights` of the batch; Pipeline(check=False) leaves out this check"
)
_DEPENDENT = (
    "task {task!r}: samples depend on each other ({names}): the loss of {samples} samples is "
    "{whole:.6g}, those of their halves add up to {halves:.6g}. Results would depend on which rank "
    "computes a sample: freescale.check_samples_independent(model, batch) finds the module, and "
    "Pipeline(check=False), without balancing, leaves out this check"
)
_BATCH_NORM = (
    "module {name!r} is a {kind}: it makes samples depend on each other, and results on which rank "
    "computes a sample; use layer norm, or Pipeline(check=False) to leave out this check"
)


def check_losses(returned: object, tasks: Sequence[str]) -> Mapping[str, Tensor]:
    """What a model returned, once it is known to be a summed loss for each task.

    Raises:
        TypeError, ValueError: it is something else.
    """
    shown = "{" + ", ".join(f"{task!r}: loss" for task in tasks) + "}"
    if isinstance(returned, Tensor):
        raise TypeError(
            f"the model returned a tensor of shape {list(returned.shape)}: return a dict with the "
            f"summed loss of each task, {shown}"
        )
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"the model returned a {type(returned).__name__}: return a dict with the summed loss "
            f"of each task, {shown}"
        )
    if set(returned) != set(tasks):
        raise ValueError(
            f"the model returned tasks {sorted(returned)}, the batch has weights for "
            f"{sorted(tasks)}"
        )
    for task, loss in returned.items():
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"the loss of task {task!r} is a {type(loss).__name__}: return a scalar tensor, "
                "the sum over the samples"
            )
        if loss.dim():
            raise ValueError(
                f"the loss of task {task!r} has shape {list(loss.shape)}: return its sum over the "
                "samples, loss.sum()"
            )
    return returned


class FirstBatchCheck:
    """Checks the first batch in which a rank has two supervised samples."""

    def __init__(self, module: nn.Module, transport: Transport, enabled: bool) -> None:
        self._module, self._transport, self._pending = module, transport, enabled

    def skip(self) -> None:
        """The model has been trained before: it was checked then."""
        self._pending = False

    def run(
        self, batches: Sequence[SequenceBatch], samples: Sequence[int], autocast: Callable[[], Any]
    ) -> None:
        """Checks the largest of a rank's micro-batches, whose rows are fetched. A collective as
        long as no batch was checked.

        Args:
            batches: this rank's micro-batches of the step.
            samples: of each rank, known to all.
            autocast: makes the context in which the model computes.

        Raises:
            TypeError, ValueError: the model on this rank returns something else than sums.
            RemoteError: it does so on another rank.
        """
        if not self._pending or max(samples) < 2:
            return
        batch = max(batches, key=len, default=SequenceBatch())
        halves = split_supervised(batch)
        with failing_together(self._transport):
            if halves is not None:
                compare_halves(self._module, batch, halves, autocast)
        checked = self._transport.gather_bytes(b"checked" if halves is not None else b"")
        self._pending = not any(checked)


def split_supervised(batch: SequenceBatch) -> tuple[SequenceBatch, SequenceBatch] | None:
    """Two parts with half of the supervised samples each; None with fewer than two of them. A part
    without any would hide a mean: it adds nothing to a sum and nothing to a mean."""
    if len(batch) < 2 or not batch.weights:
        return None
    supervised = torch.stack([weight > 0 for weight in batch.weights.values()]).any(dim=0)
    positions = supervised.nonzero().view(-1).tolist()
    if len(positions) < 2:
        return None
    middle = positions[len(positions) // 2]
    return batch.slice(0, middle), batch.slice(middle, len(batch))


def compare_halves(
    module: nn.Module,
    batch: SequenceBatch,
    halves: tuple[SequenceBatch, SequenceBatch],
    autocast: Callable[[], Any] = nullcontext,
) -> None:
    """Raises a ValueError unless the losses of the halves add up to those of the batch."""

    def losses(samples: SequenceBatch) -> dict[str, tuple[float, torch.dtype]]:
        with autocast():
            returned = check_losses(module(samples), sorted(batch.weights))
            low = torch.is_autocast_enabled(samples.device.type)
        kinds = {task: torch.bfloat16 if low else loss.dtype for task, loss in returned.items()}
        return {task: (float(loss), kinds[task]) for task, loss in returned.items()}

    with torch.no_grad(), unchanged(module):
        whole = losses(batch)
        again = losses(batch)
        is_random = any(
            not _are_close(whole[task][0], again[task][0], 0.0, 0.1 * _tolerance(whole[task][1]))
            for task in whole
        )
        if is_random:  # dropout, say, would make halves differ from the whole
            refuse_batch_norm(module)
        with evaluation_mode(module) if is_random else nullcontext():
            whole = losses(batch) if is_random else whole
            first, second = (losses(half) for half in halves)
            if is_random and whole != losses(batch):
                return  # random in evaluation mode too: nothing can be compared
    for task, (loss, dtype) in whole.items():
        losses_of = loss, first[task][0], second[task][0]
        _compare(module, task, losses_of, _tolerance(dtype), len(batch))


def _compare(
    module: nn.Module, task: str, losses: tuple[float, float, float], tolerance: float, samples: int
) -> None:
    """losses: of the whole batch and of its halves."""
    whole, first, second = losses
    if not np.isfinite([whole, first, second]).all():
        return  # the loss itself is the error, and is reported as such
    if _are_close(whole, first, second, tolerance):
        return
    slack = tolerance * max(abs(first), abs(second), _SMALLEST)
    values = {"task": task, "whole": whole, "first": first, "second": second, "samples": samples}
    if min(first, second) - slack <= whole <= max(first, second) + slack:
        raise ValueError(_MEAN.format(**values))
    norms = [f"{name!r} is a {type(part).__name__}" for name, part in _find_batch_norms(module)]
    names = ", ".join(norms) or "batch norm, in-batch negatives, lengths of the whole batch ...?"
    raise ValueError(_DEPENDENT.format(**values, names=names, halves=first + second))


def _are_close(whole: float, first: float, second: float, tolerance: float) -> bool:
    scale = max(abs(whole), abs(first) + abs(second), _SMALLEST)
    return abs(whole - first - second) <= tolerance * scale


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, _TOLERANCE_LOW)


def _find_batch_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
    ]


def refuse_batch_norm(module: nn.Module) -> None:
    """Raises a ValueError for a batch norm that trains. In evaluation mode it takes its running
    statistics, and would pass."""
    for name, part in _find_batch_norms(module):
        raise ValueError(_BATCH_NORM.format(name=name, kind=type(part).__name__))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards random states are what they were, and so are attributes and buffers of all
    submodules."""
    parts = list(module.modules())
    attributes = [dict(vars(part)) for part in parts]
    registered = [dict(part._buffers) for part in parts]
    values = {buffer: buffer.detach().clone() for buffer in module.buffers()}
    host, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = sorted({tensor.device.index or 0 for tensor in _tensors(module) if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(host)
        np.random.set_state(numbers)  # noqa: NPY002
        for part, before, buffers in zip(parts, attributes, registered, strict=True):
            vars(part).clear()
            vars(part).update(before)
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.copy_(value)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
