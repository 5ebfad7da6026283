"""A TorchRec model as the pipelines of FreeScale see it: samples in, a summed loss out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from freescale.batch import SequenceBatch
from freescale.embedding import sharded_model
from freescale.embedding.tables import Tables
from freescale.torchrec.batches import TASK, BatchForm


class SummedLoss(nn.Module):
    """Calls the model with a batch of its own form, and makes a sum over the samples of the mean
    that it returns.

    Attributes:
        model: as the user wrote it, with readers in the place of its collections.
        outputs: what the last forward returned beside the loss, without gradients.
    """

    def __init__(self, model: nn.Module, form: BatchForm) -> None:
        super().__init__()
        self.model = model
        self.form = form
        self.outputs: Any = None

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        loss, outputs = split_loss(self.model(self.form.decode(batch)))
        self.outputs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs)
        return {TASK: loss * batch.weights[TASK].sum().to(loss.dtype)}


class ShardedModel(sharded_model.ShardedModel):
    """What `freescale.torchrec.parallelize` returns. Takes batches as the model does:

    with sharded.reading(batch) as batch:
        loss, outputs = sharded(batch)
    """

    module: SummedLoss

    def __init__(self, module: SummedLoss, tables: Tables) -> None:
        super().__init__(module, tables)
        self.form = module.form

    def check_batch(self, batch: Any) -> SequenceBatch:
        """The batch on the device of the model; refuses ids that the tables do not have."""
        if not isinstance(batch, SequenceBatch):
            batch = self.form.encode(batch)
        return super().check_batch(batch)

    def __call__(self, batch: Any) -> Any:
        """What the model returns for a batch of `reading`."""
        return self.module.model(
            self.form.decode(batch) if isinstance(batch, SequenceBatch) else batch
        )


def split_loss(returned: Any) -> tuple[Tensor, Any]:
    """(mean loss, outputs) of what a model returned: a loss, or a tuple that begins with it.

    Raises:
        TypeError, ValueError: it is something else.
    """
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
