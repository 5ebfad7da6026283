"""The inputs of the encoder, in plain torch: scaled values plus the rows of their positions, with
dropout, and the tokens' random keys, which determine the dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.batch import compute_offsets
from freescale.random import derive, draw_keep_mask

STREAM = 1 << 20  # number of the draw from a key, beyond those of the layers


def compute_positions(lengths: Tensor, tokens: int) -> Tensor:
    """[samples] lengths -> [tokens]: 0, 1, 2, ... within each sample."""
    starts = torch.repeat_interleave(compute_offsets(lengths)[:-1], lengths, output_size=tokens)
    return torch.arange(tokens, device=lengths.device) - starts


def derive_token_keys(keys: Tensor, lengths: Tensor, slots: Tensor) -> Tensor:
    """[samples] keys and lengths, [tokens] slots in the sample -> [tokens] keys."""
    return derive(torch.repeat_interleave(keys, lengths, output_size=slots.numel()), slots)


def add_positions(
    x: Tensor,  # [tokens, width]
    position: Tensor,  # [positions, width]
    lengths: Tensor,  # [samples] int64, candidates included
    candidate_counts: Tensor | None,  # [samples] int64
    keys: Tensor | None,  # [samples] int64: random keys; None: no dropout
    *,
    scale: float = 1.0,  # of x, before positions are added
    keep: float = 1.0,  # share of the elements that is kept, if there are keys
) -> tuple[Tensor, Tensor | None]:
    """Returns scale * x plus the rows of the tokens' positions, in their dtype, after dropout, and
    [tokens] int64 keys. All candidates of a sample have the position right after its history."""
    slots = compute_positions(lengths, x.shape[0])
    positions = slots
    if candidate_counts is not None:
        history = lengths - candidate_counts
        after = torch.repeat_interleave(history, lengths, output_size=x.shape[0])
        positions = torch.minimum(slots, after)
    token_keys = None if keys is None else derive_token_keys(keys, lengths, slots)
    inputs = x.to(position.dtype) * scale + position[positions]
    return drop_inputs(inputs, token_keys, keep), token_keys


def drop_inputs(x: Tensor, token_keys: Tensor | None, keep: float) -> Tensor:
    """x [tokens, width] with dropout as a function of the tokens' random keys."""
    if token_keys is None or keep == 1:
        return x
    mask = draw_keep_mask(derive(token_keys, STREAM), x.shape[1], keep)
    return x * mask.to(x.dtype).mul_(1 / keep)
