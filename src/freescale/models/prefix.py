"""Tokens before a history that every event and candidate sees, such as features of the user.

They are causal among themselves, have no position and no bias, do not count towards the longest
history, and predict nothing. SiLU attention is a sum over keys, so the part of the prefix is
computed apart and added: the attention between events, its biases and its divisor stay as they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.batch import HostSizes, concat_ranges
from freescale.kernels.dispatch.attention import hstu_attention, plan_attention
from freescale.kernels.layer.reference import drop_inputs
from freescale.kernels.upload import upload
from freescale.models.encoder import Encoder
from freescale.models.hstu_layer import HSTULayer, get_product_dtype
from freescale.random import derive


class Prefix:
    """The prefixes of a batch inside an HSTU encoder, whose rows stand after all others."""

    def __init__(
        self,
        encoder: Encoder,
        heads: int,
        widths: tuple[int, int],  # widths of queries and values
        tokens: Tensor,  # [samples, count, width]
        lengths: Tensor,  # [samples] int64, on the host: events of each, not all 0
        keys: Tensor | None,  # [samples] int64; None: nothing is dropped
    ) -> None:
        samples, count = tokens.shape[:2]
        self.rows = samples * count
        self.inputs, self.keys = prepare_prefix(
            tokens, keys, encoder.position.dtype, encoder.input_scale, 1 - encoder.input_dropout
        )
        # Events in blocks of the mean length: padding adds at most as many again.
        own = lengths.numpy()
        self._size = -(-int(own.sum()) // samples)  # events of a block
        blocks = -(-own // self._size)  # number of blocks of each sample
        first = torch.from_numpy((np.cumsum(blocks) - blocks) * self._size)
        self._slots = upload(concat_ranges(first, lengths).numpy(), tokens.device)
        self._owners = upload(np.repeat(np.arange(samples), blocks), tokens.device)
        self._lengths = torch.full((samples,), count, device=tokens.device)
        self._plan = plan_attention(
            self._lengths,
            heads,
            host=HostSizes(torch.full((samples,), count)),
            widths=widths,
            dtype=get_product_dtype(encoder.position),
        )

    def attend(
        self, layer: HSTULayer, of_events: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Adds what events see of the prefix, and appends what its tokens see.

        Args:
            layer: whose attention it is.
            of_events: [events, heads, d_v]: what they see of each other.
            q, k, v: [events + rows, heads, d].
        """
        events = of_events.shape[0]
        q, mine, k, v = q[:events], q[events:], k[events:], v[events:]
        alpha, longest = layer.d_qk**-0.5, layer.max_length
        own = hstu_attention(
            mine, k, v, self._lengths, plan=self._plan, scale_length=longest, alpha=alpha
        )
        padded = q.new_zeros(len(self._owners) * self._size, *q.shape[1:])
        q = padded.index_copy(0, self._slots, q).view(-1, self._size, *q.shape[1:]).transpose(1, 2)
        scores = (q * alpha) @ self._spread(k).mT  # [blocks, heads, size, count]
        weights = F.silu(scores.to(torch.promote_types(scores.dtype, torch.float32)))
        seen = (weights.to(v.dtype) @ self._spread(v)).transpose(1, 2).flatten(0, 1) / longest
        return torch.cat([of_events + seen.index_select(0, self._slots), own])

    def _spread(self, values: Tensor) -> Tensor:
        """[rows, heads, d] -> [blocks, heads, count, d]: those of each block's sample."""
        of_samples = values.reshape(len(self._lengths), -1)
        # an embedding, for its gradients have a fixed order on GPUs
        of_blocks = F.embedding(self._owners, of_samples)
        return of_blocks.view(len(self._owners), -1, *values.shape[1:]).transpose(1, 2)


def prepare_prefix(
    tokens: Tensor, keys: Tensor | None, dtype: torch.dtype, scale: float, keep: float
) -> tuple[Tensor, Tensor | None]:
    """tokens [samples, count, width], keys [samples] -> inputs [samples * count, width] of the
    first layer, and their keys: those of events are derived from numbers from 0 on, these from
    negative ones."""
    samples, count, width = tokens.shape
    inputs = (tokens.to(dtype) * scale).reshape(samples * count, width)
    if keys is None:
        return inputs, None
    numbers = -1 - torch.arange(count, device=tokens.device)
    token_keys = derive(keys[:, None], numbers).view(-1)
    return drop_inputs(inputs, token_keys, keep), token_keys
