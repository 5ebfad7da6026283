"""The encoder's inputs, in plain torch: the tokens' values, scaled, with the row of each token's
position, and what dropout leaves of them; and the keys from which what is dropped follows.

The reference of `triton.positions`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.batch import compute_offsets
from freescale.random import derive, draw_keep_mask

STREAM = 1 << 20  # which of the draws that a key gives: beyond those of any layer


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
    keys: Tensor | None,  # [samples] int64; None: nothing is dropped
    *,
    scale: float = 1.0,  # of x, before positions are added
    keep: float = 1.0,  # the share of the sum that is kept, if there are keys
) -> tuple[Tensor, Tensor | None]:
    """(scale * x with the rows of the tokens' positions added, in their dtype, after dropout;
    [tokens] int64 keys).

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
    inputs = x.to(position.dtype) * scale + position[positions]
    return drop_inputs(inputs, token_keys, keep), token_keys


def drop_inputs(x: Tensor, token_keys: Tensor | None, keep: float) -> Tensor:
    """x [tokens, width] with dropout that is a function of the tokens' keys."""
    if token_keys is None or keep == 1:
        return x
    mask = draw_keep_mask(derive(token_keys, STREAM), x.shape[1], keep)
    return x * mask.to(x.dtype).mul_(1 / keep)
