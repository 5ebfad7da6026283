"""`check_samples_independent` for models and batches of TorchRec's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from freescale.pipeline import independence
from freescale.torchrec.batches import BatchForm
from freescale.torchrec.sharded_model import ShardedModel, SummedLoss


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
