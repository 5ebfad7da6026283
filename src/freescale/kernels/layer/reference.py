"""What surrounds the attention in plain torch: the encoder's inputs with positions and dropout, the
norm before, SiLU and split, the gated norm after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.batch import compute_offsets
from freescale.random import derive, draw_keep_mask


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x [tokens, width] -> the same shape, in `dtype`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


def silu_split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """x [tokens, sum(sizes)] -> SiLU(x), split into columns of these sizes."""
    return torch.split(F.silu(x), list(sizes), dim=1)


def gated_norm(
    x: Tensor,  # [tokens, width]
    gate: Tensor,  # [tokens, width], may be a slice of a wider projection
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    keys: Tensor | None = None,  # [tokens] int64: random keys; None: no dropout
    stream: int = 0,  # number of the draw from a key; each layer has its own
    keep: float = 1.0,  # share of the elements that is kept
) -> Tensor:  # [tokens, width], in `dtype`
    """layer_norm(x) * gate, with dropout as a function of the tokens' random keys."""
    gated = F.layer_norm(x, weight.shape, weight, bias, eps) * gate
    if keys is not None:
        mask = draw_keep_mask(derive(keys, stream), gated.shape[1], keep)
        gated = gated * mask.to(gated.dtype).mul_(1 / keep)
    return gated.to(dtype)


def swish_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x [tokens, width] -> x * sigmoid(layer_norm(x)), in `dtype`."""
    normed = F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps)
    return (x * normed.sigmoid()).to(dtype)


PART = 1 << 21  # distance between the streams of a wide layer's columns, beyond all streams


def wide_gate(
    x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, *,
    keys: Tensor | None = None, stream: int = 0, keep: float = 1.0,
) -> Tensor:  # fmt: skip
    """As `gated_norm`, but [tokens, 3 * width]: the gate, x and layer_norm(x) * gate side by side,
    each with draws of its own."""
    parts = [gate, x, F.layer_norm(x, weight.shape, weight, bias, eps) * gate]
    if keys is not None:
        for number, part in enumerate(parts):
            mask = draw_keep_mask(derive(keys, stream + number * PART), part.shape[1], keep)
            parts[number] = part * mask.to(part.dtype).mul_(1 / keep)
    return torch.cat(parts, dim=1).to(dtype)


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
    first: Tensor | None = None,  # [samples] int64: tokens before these; None: 0
) -> tuple[Tensor, Tensor | None]:
    """Returns scale * x plus the rows of the tokens' positions, in their dtype, after dropout, and
    [tokens] int64 keys. All candidates of a sample have the position right after its history."""
    slots = compute_positions(lengths, x.shape[0])
    if first is not None:
        slots = slots + torch.repeat_interleave(first, lengths, output_size=x.shape[0])
    positions = slots
    if candidate_counts is not None:
        history = lengths - candidate_counts
        history = history if first is None else history + first
        after = torch.repeat_interleave(history, lengths, output_size=x.shape[0])
        positions = torch.minimum(slots, after)
    token_keys = None if keys is None else derive_token_keys(keys, lengths, slots)
    inputs = x.to(position.dtype) * scale + position[positions]
    return drop_inputs(inputs, token_keys, keep), token_keys


def add_encodings(
    x: Tensor,  # [tokens, width]
    position: Tensor,  # [positions, width]
    time: Tensor,  # [buckets, width], in the same dtype
    places: Tensor,  # [tokens] int64
    buckets: Tensor,  # [tokens] int64
    token_keys: Tensor | None,  # [tokens] int64: random keys; None: no dropout
    *,
    scale: float = 1.0,
    keep: float = 1.0,
) -> Tensor:
    """scale * x plus a row of each table, in their dtype, after dropout as of `add_positions`."""
    rows = F.embedding(places, position) + F.embedding(buckets, time)
    return drop_inputs(x.to(position.dtype) * scale + rows, token_keys, keep)


def drop_inputs(x: Tensor, token_keys: Tensor | None, keep: float) -> Tensor:
    """x [tokens, width] with dropout as a function of the tokens' random keys."""
    return drop(x, None if keep == 1 else token_keys, STREAM, keep)


def drop(x: Tensor, keys: Tensor | None, stream: int, keep: float, *, relu: bool = False) -> Tensor:
    """x [tokens, width], after ReLU if `relu`, with dropout that is a function of the tokens'
    keys; None: nothing is dropped."""
    x = F.relu(x) if relu else x
    if keys is None:
        return x
    mask = draw_keep_mask(derive(keys, stream), x.shape[1], keep)
    return x * mask.to(x.dtype).mul_(1 / keep)
