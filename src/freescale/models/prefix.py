"""Tokens before a history that every event and candidate sees, such as features of the user.

They are causal among themselves, have no position and no bias, do not count towards the longest
history, and predict nothing. SiLU attention is a sum over keys, so the part of the prefix is
computed apart and added: the attention between events, its biases and its divisor stay as they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freescale.batch import HostSizes
from freescale.kernels.attention.checks import Plan
from freescale.kernels.dispatch.attention import attend_to_summaries, hstu_attention, plan_attention
from freescale.kernels.layer.reference import drop_inputs
from freescale.kernels.summary_attention.plan import SummaryPlan
from freescale.models.encoder import Encoder
from freescale.models.hstu_layer import HSTULayer, get_product_dtype
from freescale.random import derive
from freescale.segments import Segments


class Prefix:
    """The prefixes of a batch inside an HSTU encoder, whose rows stand after all others."""

    def __init__(
        self,
        encoder: Encoder,
        heads: int,
        widths: tuple[int, int],  # widths of queries and values
        tokens: Tensor,  # [samples, count, width]
        rows: Tensor,  # [samples] int64, on the host: rows of each sample that see its prefix
        keys: Tensor | None,  # [samples] int64; None: nothing is dropped
    ) -> None:
        samples, count = tokens.shape[:2]
        self.rows = samples * count
        self.inputs, self.keys = prepare_prefix(
            tokens, keys, encoder.position.dtype, encoder.input_scale, 1 - encoder.input_dropout
        )
        none, one = np.zeros(samples, np.int64), np.ones(samples, np.int64)
        self._seen = SummaryPlan(Segments(count, count), rows.numpy(), none, one)
        self._lengths = torch.full((samples,), count, device=tokens.device)
        self._plan = plan_attention(
            self._lengths,
            heads,
            host=HostSizes(torch.full((samples,), count)),
            widths=widths,
            dtype=get_product_dtype(encoder.position),
        )

    def attend(
        self, layer: HSTULayer, plan: Plan, of_events: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Adds what events see of the prefix, and appends what its tokens see.

        Args:
            layer: whose attention it is.
            plan: of the events.
            of_events: [events, heads, d_v]: what they see of each other.
            q, k, v: [events + rows, heads, d].
        """
        events = of_events.shape[0]
        options = {"scale_length": layer.max_length, "alpha": layer.d_qk**-0.5}
        seen = attend_to_summaries(plan, q[:events], k[events:], v[events:], self._seen, **options)
        own = hstu_attention(
            q[events:], k[events:], v[events:], self._lengths, plan=self._plan, **options
        )
        return torch.cat([of_events + seen, own])


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
