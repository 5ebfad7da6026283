"""What heads need of an encoder, and what encoders share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from freescale.batch import HostSizes
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.layer import add_positions
from freescale.sequences import mark_positions
from freescale.visible import Visible


class Encoder(nn.Module, ABC):
    """[tokens, width] -> [tokens, width] over jagged samples, each with its history first and then
    its candidates.

    A sample's outputs depend on that sample alone: nothing is normalised over the batch, and what
    is dropped in training mode follows from the sample's key. Inputs are multiplied by
    `input_scale`, by default the square root of the width, before a row for their position is
    added; `input_dropout`, by default `dropout`, applies to the sum.
    """

    layers: nn.ModuleList
    has_time_bias: bool = False  # whether `timestamps` are read

    def __init__(
        self,
        *,
        width: int,
        max_length: int,  # events of a history, at most
        dropout: float,
        input_scale: float | None,
        input_dropout: float | None,
        checkpoint: bool = False,  # recompute each layer's activations in backward
        visible: Visible | None = None,  # earlier events that an event attends to; None: all
        **sizes: int | None,  # sizes of the layers
    ) -> None:
        super().__init__()
        for name, size in {"width": width, "max_length": max_length, **sizes}.items():
            if size is None or size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        input_dropout = dropout if input_dropout is None else input_dropout
        for name, share in (("dropout", dropout), ("input_dropout", input_dropout)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} must be in [0, 1), not {share}")
        self.width = width
        self.max_length = max_length
        self.checkpoint = checkpoint
        # no limit if it hides nothing; candidates stand after the longest history
        self.visible = None if visible is None or visible.last > max_length else visible
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.input_scale = float(width**0.5 if input_scale is None else input_scale)
        # a parameter and no nn.Embedding: long histories touch most of it in every step
        self.position = nn.Parameter(torch.empty(max_length + 1, width))
        nn.init.normal_(self.position, std=width**-0.5)
        mark_positions(self.position)

    @abstractmethod
    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,  # [samples] int64, candidates included
        keys: Tensor | None = None,  # [samples] int64
        timestamps: Tensor | None = None,  # [tokens] int64
        candidate_counts: Tensor | None = None,  # [samples] int64
        host: HostSizes | None = None,  # sizes of the above; read from the device if None
        prefix: Tensor | None = None,  # [samples, count, width]: tokens that all others see
    ) -> Tensor:  # [tokens, width]
        """Encodes every token, except those of the prefix."""

    def encode_last(
        self,
        x: Tensor,
        lengths: Tensor,
        keys: Tensor | None = None,
        timestamps: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """[samples, width]: as `forward`, the output of each sample's last token, and anything for
        a sample without one. There are tokens."""
        outputs: Tensor = self(x, lengths, keys, timestamps, **options)
        return outputs[lengths.cumsum(0) - 1]

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture it: equal sizes launch kernels with equal arguments."""
        return False

    @property
    def drops(self) -> bool:
        return self.training and max(self.dropout, self.input_dropout) > 0

    def _check_width(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.width:
            raise ValueError(f"the encoder takes [tokens, {self.width}], not {list(x.shape)}")

    def _prepare_inputs(
        self, plan: AttentionPlan | TilePlan, x: Tensor, keys: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Inputs of the first layer in the encoder's dtype, and the tokens' keys if anything is
        dropped."""
        return add_positions(
            plan,
            x,
            self.position,
            self._choose_keys(keys, plan.lengths),
            scale=self.input_scale,
            keep=1 - self.input_dropout,
        )

    def _check_sizes(self, x: Tensor, tokens: int, longest_history: int) -> None:
        """Checks a plan's sizes against x and `max_length`."""
        if longest_history > self.max_length:
            raise ValueError(
                f"a history has {longest_history} events, the model was built for "
                f"max_length={self.max_length}; cut the histories or raise max_length"
            )
        if tokens != x.shape[0]:
            raise ValueError(f"lengths add up to {tokens}, but there are {x.shape[0]} tokens")

    def _run_each(self, x: Tensor, inputs: Sequence[Any], layers: slice = slice(None)) -> Tensor:
        """Runs layers one after another, with the same further inputs."""
        for layer in list(self.layers)[layers]:
            if self.checkpoint and torch.is_grad_enabled():
                # dropout is a function of keys: there is no generator state to keep
                x = recompute(layer, x, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, *inputs)
        return x

    def _choose_keys(self, keys: Tensor | None, lengths: Tensor) -> Tensor | None:
        """The samples' keys, which dropout follows from; None without dropout."""
        if not self.drops:
            return None
        if keys is None or keys.shape != lengths.shape:
            got = "none" if keys is None else f"{keys.dtype} {list(keys.shape)}"
            raise ValueError(f"dropout needs keys, one per sample ({lengths.numel()}); got {got}")
        return keys
