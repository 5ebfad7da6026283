"""HSTU as the encoder of a DLRM: wide layers without biases, and two encodings of every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from freescale.batch import HostSizes
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.layer import add_encodings
from freescale.kernels.layer.reference import compute_positions, derive_token_keys
from freescale.models.hstu import HSTU


class DlrmHSTU(HSTU):
    """[tokens, width] -> [tokens, width] over jagged samples, each with its context first, then its
    history, then its candidates.

    Context tokens are tokens like others: causal, and seen by all that follow. Positions are
    counted backwards from the candidates, after `context` positions for the context itself. The
    time before the last candidate's falls into a bucket. Rows for both are added to the inputs,
    which are multiplied by the square root of the width before. Times are seconds, those of context
    0. `max_length` is of context and history.
    """

    def __init__(
        self,
        *,
        width: int,
        context: int,  # tokens of context
        positions: int,
        time_buckets: int,
        **options: Any,  # of HSTU
    ) -> None:
        super().__init__(width=width, position_bias=False, time_bias=False, wide=True, **options)
        if context < 0 or positions <= context or time_buckets < 1:
            raise ValueError(
                "positions must be more than the context's and time_buckets at least 1, not "
                f"{positions}, {context} and {time_buckets}"
            )
        self.context = context
        self.position = _draw_rows(positions, positions, width)
        self.time = _draw_rows(time_buckets + 1, time_buckets, width)

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,  # [samples] int64, context and candidates included
        keys: Tensor | None = None,  # [samples] int64
        timestamps: Tensor | None = None,  # [tokens] int64
        candidate_counts: Tensor | None = None,  # [samples] int64
        host: HostSizes | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:  # [tokens, width]
        if prefix is not None or timestamps is None:
            raise ValueError("a DLRM encoder needs timestamps, and takes context as tokens of x")
        self._check_width(x)
        plan = self._plan_attention(lengths, candidate_counts, None, host)
        self._check_sizes(x, plan.tokens, plan.longest_history)
        if not plan.tokens:
            return x.to(self.position.dtype)
        x, token_keys = self._encode_inputs(plan, x, timestamps, keys)
        return self._run_layers(x, lengths, token_keys, None, candidate_counts, plan)

    def _encode_inputs(
        self, plan: AttentionPlan | TilePlan, x: Tensor, timestamps: Tensor, keys: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Inputs of the first layer, and the tokens' keys if anything is dropped."""
        lengths, counts, tokens = plan.lengths, plan.candidate_counts, x.shape[0]
        ends = (lengths.cumsum(0) - 1).clamp(min=0)
        before = lengths if counts is None else lengths - counts  # the candidates
        each = torch.stack([before, timestamps[ends]], dim=1)
        history, now = torch.repeat_interleave(each, lengths, 0, output_size=tokens).unbind(1)
        slots = compute_positions(lengths, tokens)
        backwards = (history - slots).clamp(min=0) + self.context
        places = torch.where(
            slots < self.context, slots, backwards.clamp(max=self.position.shape[0] - 1)
        )
        buckets = find_time_buckets(now - timestamps, self.time.shape[0] - 1)
        chosen = self._choose_keys(keys, lengths)
        token_keys = None if chosen is None else derive_token_keys(chosen, lengths, slots)
        inputs = add_encodings(
            x, self.position, self.time, places, buckets, token_keys, scale=self.input_scale,
            keep=1 - self.input_dropout,
        )  # fmt: skip
        return inputs, token_keys


def _draw_rows(rows: int, count: int, width: int) -> nn.Parameter:
    """Rows [rows, width], uniform up to 1 / sqrt(count)."""
    parameter, bound = nn.Parameter(torch.empty(rows, width)), count**-0.5
    nn.init.uniform_(parameter, -bound, bound)
    return parameter


def find_time_buckets(elapsed: Tensor, last: int) -> Tensor:
    """Seconds [...] before the request -> bucket [...] int64: the root of the minutes, at most
    `last`."""
    minutes = elapsed.clamp(min=0).to(torch.float32) / 60
    return minutes.sqrt().long().clamp(max=last)
