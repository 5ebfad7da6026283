"""What heads ask of an encoder, and what encoders have in common."""

from __future__ import annotations

from torch import Tensor, nn

from freescale.batch import HostSizes

TOO_LONG = (
    "a history has {} events, the model was built for max_length={}; cut the histories or "
    "raise max_length"
)


class Encoder(nn.Module):
    """[tokens, width] -> [tokens, width] over jagged samples, each with its history first and then
    its candidates.

    A sample's outputs depend on that sample alone: nothing is normalised over the batch, and what
    is dropped in training mode follows from the sample's key.
    """

    width: int
    max_length: int  # events of a history, at most
    dropout: float
    layers: nn.ModuleList
    has_time_bias: bool = False  # whether `timestamps` are read

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,  # [samples] int64, candidates included
        keys: Tensor | None = None,  # [samples] int64
        timestamps: Tensor | None = None,  # [tokens] int64
        candidate_counts: Tensor | None = None,  # [samples] int64
        host: HostSizes | None = None,  # of the above; without it they are read from the device
    ) -> Tensor:  # [tokens, width]
        raise NotImplementedError

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold forward and backward: for batches of one size the kernels
        are launched with the same arguments."""
        return False

    @property
    def drops(self) -> bool:
        return self.training and self.dropout > 0

    def _check_width(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.width:
            raise ValueError(f"the encoder takes [tokens, {self.width}], not {list(x.shape)}")

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


def check_shape(dropout: float, **sizes: int | None) -> None:
    """Refuses sizes below 1 and a dropout that keeps nothing."""
    for name, value in sizes.items():
        if value is None or value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), not {dropout}")


def _describe(keys: Tensor | None) -> str:
    return "none" if keys is None else f"{keys.dtype} {list(keys.shape)}"
