"""Adapts a TorchRec model to the pipelines of FreeScale: samples in, a summed loss out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from freescale.batch import SequenceBatch
from freescale.embedding import sharded_model
from freescale.embedding.tables import Tables
from freescale.pipeline import independence
from freescale.torchrec.batches import TASK, BatchForm


class SummedLoss(nn.Module):
    """Calls the model with a batch in its own form, and turns its mean loss into a sum."""

    def __init__(self, model: nn.Module, form: BatchForm) -> None:
        super().__init__()
        self.model = model  # the user's, with readers in place of its collections
        self.form = form
        self.outputs: Any = None  # outputs of the last forward except the loss, detached

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        loss, outputs = split_loss(self.model(self.form.decode(batch)))
        self.outputs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs)
        return {TASK: loss * batch.weights[TASK].sum().to(loss.dtype)}


class ShardedModel(sharded_model.ShardedModel):
    """The result of `freescale.torchrec.parallelize`. Takes the model's own batches:

    with sharded.reading(batch) as batch:
        loss, outputs = sharded(batch)
    """

    module: SummedLoss

    def __init__(self, module: SummedLoss, tables: Tables) -> None:
        super().__init__(module, tables)
        self.form = module.form

    def check_batch(self, batch: Any) -> SequenceBatch:
        """Moves the batch to the model's device; refuses ids that the tables do not have."""
        if not isinstance(batch, SequenceBatch):
            batch = self.form.encode(batch)
        return super().check_batch(batch)

    def __call__(self, batch: Any) -> Any:
        """The model's result for a batch of `reading`."""
        own = self.form.decode(batch) if isinstance(batch, SequenceBatch) else batch
        return self.module.model(own)


def split_loss(returned: Any) -> tuple[Tensor, Any]:
    """Splits a model's result, a loss or a tuple that begins with it, into (mean loss, outputs).
    TypeError or ValueError if it is something else."""
    loss, outputs = returned, None
    if isinstance(returned, (tuple, list)) and returned:
        loss, *rest = returned
        outputs = rest[0] if len(rest) == 1 else tuple(rest)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the model returned a {type(returned).__name__}: return the mean loss, or "
            "(loss, outputs)"
        )
    if loss.dim() and loss.numel() != 1:
        raise ValueError(
            f"the model returned a loss of shape {list(loss.shape)}: return its mean over the "
            "samples, a scalar"
        )
    if not torch.is_floating_point(loss):
        raise TypeError(f"the model returned a loss of {loss.dtype}")
    return loss.reshape(()), outputs


def check_samples_independent(
    model: nn.Module | ShardedModel,
    batch: Any,
    *,
    samples: int = 8,
    shared: Sequence[str] = (),
    loss_weight: str | Callable[[Any], Tensor] | None = None,
) -> None:
    """`freescale.check_samples_independent` for a model whose batches contain KeyedJaggedTensors,
    before or after `parallelize`.

    Args:
        model: returns the mean loss over the samples, or (loss, outputs).
        batch: at least two samples.
        samples: how many of them are checked.
        shared, loss_weight: as in `freescale.torchrec.parallelize`, for a model before it.

    Raises:
        ValueError: samples depend on each other; the message names the module.
    """
    if isinstance(model, ShardedModel):
        independence.check_samples_independent(model, batch, samples=samples)
        return
    form = BatchForm(shared, loss_weight)
    independence.check_samples_independent(
        SummedLoss(model, form), form.encode(batch), samples=samples
    )
