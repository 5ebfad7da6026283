"""What heads ask of an encoder, and what encoders have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from freescale.batch import HostSizes
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.positions.dispatch import add_positions
from freescale.sequences import mark_positions

TOO_LONG = (
    "a history has {} events, the model was built for max_length={}; cut the histories or "
    "raise max_length"
)


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
        **sizes: int | None,  # of the layers
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
        host: HostSizes | None = None,  # of the above; without it they are read from the device
    ) -> Tensor:  # [tokens, width]
        """Encodes every token."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold forward and backward: for batches of one size the kernels
        are launched with the same arguments."""
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
        """What the first layer reads, in the encoder's own dtype, whatever the tables hold; and
        the tokens' keys, if anything is dropped."""
        return add_positions(
            plan,
            x,
            self.position,
            self._choose_keys(keys, plan.lengths),
            scale=self.input_scale,
            keep=1 - self.input_dropout,
        )

    def _check_sizes(self, x: Tensor, tokens: int, longest_history: int) -> None:
        """Of a batch's plan, against x and the positions that the model has."""
        if longest_history > self.max_length:
            raise ValueError(TOO_LONG.format(longest_history, self.max_length))
        if tokens != x.shape[0]:
            raise ValueError(f"lengths add up to {tokens}, but there are {x.shape[0]} tokens")

    def _choose_keys(self, keys: Tensor | None, lengths: Tensor) -> Tensor | None:
        """The samples' keys, from which what is dropped follows; None where nothing is."""
        if not self.drops:
            return None
        if keys is None or keys.shape != lengths.shape:
            raise ValueError(
                f"dropout needs keys, one per sample ({lengths.numel()}); got {_describe(keys)}"
            )
        return keys


def _describe(keys: Tensor | None) -> str:
    return "none" if keys is None else f"{keys.dtype} {list(keys.shape)}"
