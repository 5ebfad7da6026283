"""What the encoder's inputs get from a token's place in its sample, in plain torch: the row of its
position, and the key of what is dropped.

The reference of `triton.positions`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.batch import compute_offsets
from freescale.random import derive


def compute_positions(lengths: Tensor, tokens: int) -> Tensor:
    """[samples] lengths -> [tokens]: 0, 1, 2, ... within each sample."""
    starts = torch.repeat_interleave(compute_offsets(lengths)[:-1], lengths, output_size=tokens)
    return torch.arange(tokens, device=lengths.device) - starts


def derive_token_keys(keys: Tensor, lengths: Tensor, slots: Tensor) -> Tensor:
    """[samples] keys and lengths, [tokens] places in the sample -> [tokens] keys."""
    return derive(torch.repeat_interleave(keys, lengths, output_size=slots.numel()), slots)


def add_positions(
    x: Tensor,  # [tokens, width]
    position: Tensor,  # [positions, width]
    lengths: Tensor,  # [samples] int64, candidates included
    candidate_counts: Tensor | None,  # [samples] int64
    keys: Tensor | None,  # [samples] int64
) -> tuple[Tensor, Tensor | None]:
    """(x with the rows of the tokens' positions added, in their dtype; [tokens] int64 keys).

    All candidates of a sample stand right after its history.
    """
    slots = compute_positions(lengths, x.shape[0])
    positions = slots
    if candidate_counts is not None:
        history = torch.repeat_interleave(
            lengths - candidate_counts, lengths, output_size=x.shape[0]
        )
        positions = torch.minimum(slots, history)
    token_keys = None if keys is None else derive_token_keys(keys, lengths, slots)
    return x.to(position.dtype) + position[positions], token_keys
