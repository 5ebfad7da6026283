"""HSTU over histories cut into segments, with learned summaries between them (PerSRec, arXiv
2601.03479).

`freescale.segments` defines who sees whom. Summaries stand among the events inside the encoder
only: no head sees them, so they have no loss, and the last event of a segment predicts the next
event. In serving, old segments are computed once (`compress`), which keeps the keys and values of
their summaries; a request computes its recent events alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.batch import HostSizes
from freescale.config import ModelConfig
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.attention import attend_to_summaries
from freescale.kernels.layer.reference import (
    compute_positions,
    derive_token_keys,
    drop_inputs,
)
from freescale.kernels.upload import upload
from freescale.models.hstu import HSTU
from freescale.models.hstu_layer import HSTULayer
from freescale.models.segments.arrangement import Rows, arrange_rows
from freescale.models.segments.memory import Memory
from freescale.segments import Segments


class SegmentedHSTU(HSTU):
    """HSTU whose events see segments of `segment` events before their own only through
    `segment_tokens` learned summaries of each.

    Where they are seen, each counts for `segment_weight` events: 1, or up to the segment /
    segment_tokens events that it stands for. With `segment_pooling` a summary starts from its
    learned vector and the pooled events of its segment; else from the vector alone. The other
    parameters are those of HSTU with the same options, and drawn the same; events keep their
    positions."""

    def __init__(
        self,
        *,
        width: int,
        max_length: int,
        segment: int,
        segment_tokens: int = ModelConfig.segment_tokens,
        segment_weight: float = ModelConfig.segment_weight,
        segment_pooling: bool = ModelConfig.segment_pooling,
        **options: Any,
    ) -> None:
        segments = Segments(segment, segment_tokens)
        if not 0 < segment_weight <= segment / segment_tokens:
            raise ValueError(
                f"a token counts for at most the {segment / segment_tokens:g} events that it "
                "stands for, segment / segment_tokens, "
                f"and for more than 0, not segment_weight={segment_weight}"
            )
        if segment > max_length:
            raise ValueError(
                f"a segment of {segment} events is longer than the longest history, "
                f"max_length={max_length}"
            )
        super().__init__(
            width=width,
            max_length=max_length,
            reach=max(max_length, segments.period - 1),
            **options,
        )
        self.segments = segments
        self.segment_weight = segment_weight
        self.segment_pooling = segment_pooling
        self.summaries = nn.Parameter(torch.empty(segment_tokens, width))
        nn.init.normal_(self.summaries, std=width**-0.5)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor,
        keys: Tensor | None = None,
        timestamps: Tensor | None = None,
        candidate_counts: Tensor | None = None,
        host: HostSizes | None = None,
        prefix: Tensor | None = None,  # [samples, count, width]: tokens that all others see
        memory: Memory | None = None,  # of earlier events
    ) -> Tensor:  # [tokens, width]
        rows = self._arrange(x, lengths, candidate_counts, host, memory)
        earlier = EarlierSegments(rows, memory, self.segment_weight)
        outputs = self._run(x, rows, earlier, keys, timestamps, prefix)
        return outputs if rows.open else outputs.index_select(0, rows.events)

    @torch.no_grad()
    def compress(
        self,
        x: Tensor,  # [events, width]
        lengths: Tensor,  # [samples] int64, whole segments
        timestamps: Tensor | None = None,
        host: HostSizes | None = None,
        memory: Memory | None = None,
        prefix: Tensor | None = None,
    ) -> Memory:
        """Computes what later events will see of these, and of `memory` before them.

        Raises:
            ValueError: If a sample has events after its last full segment.
        """
        rows = self._arrange(x, lengths, None, host, memory)
        plan = rows.plan
        rest = plan.lengths - plan.closed * self.segments.period
        if rest.any():
            sample = int(rest.argmax())
            raise ValueError(
                f"sample {sample} has {rest[sample]} events after its last full segment of "
                f"{self.segments.length}: compress whole segments and score with the rest"
            )
        earlier = EarlierSegments(rows, memory, self.segment_weight, keep=True)
        self._run(x, rows, earlier, None, timestamps, prefix)
        assert earlier.kept is not None
        keys, values = zip(*earlier.kept, strict=True)
        return Memory(torch.from_numpy(plan.known + plan.closed), keys, values)

    def _arrange(
        self,
        x: Tensor,
        lengths: Tensor,
        candidate_counts: Tensor | None,
        host: HostSizes | None,
        memory: Memory | None,
    ) -> Rows:
        if memory is not None and memory.segments.shape != lengths.shape:
            raise ValueError(
                f"the memory is of {memory.segments.numel()} samples, the batch has "
                f"{lengths.numel()}"
            )
        known = None if memory is None else memory.segments.numpy()
        rows = arrange_rows(self.segments, lengths, candidate_counts, host, known)
        self._check_sizes(x, rows.events.numel(), rows.longest_history)
        return rows

    def _run(
        self,
        x: Tensor,
        rows: Rows,
        earlier: EarlierSegments,
        keys: Tensor | None,
        timestamps: Tensor | None,
        prefix: Tensor | None,
    ) -> Tensor:
        """[events, width] -> [rows, width]."""
        timestamps = self._check_inputs(x, timestamps)
        x = x.to(self.position.dtype) * self.input_scale + self.position[rows.event_positions]
        # in training the summaries have a gradient in every batch, if only zeros
        if not rows.open or torch.is_grad_enabled():
            x, timestamps = self._interleave(x, timestamps, rows)
        plan = self._plan_attention(rows.parts, rows.candidate_counts, timestamps, rows.host)
        on_host = HostSizes(torch.from_numpy(rows.plan.lengths))
        before = self._make_prefix(prefix, rows.plan.rows, rows.lengths, on_host, keys)
        keys, token_keys = self._choose_keys(keys, rows.lengths), None
        if keys is not None:
            slots = compute_positions(rows.lengths, x.shape[0])
            token_keys = derive_token_keys(keys, rows.lengths, slots)
        x = drop_inputs(x, token_keys, 1 - self.input_dropout)
        return self._run_layers(
            x, rows.parts, token_keys, timestamps, rows.candidate_counts, plan, earlier, before
        )

    def _interleave(
        self, x: Tensor, timestamps: Tensor | None, rows: Rows
    ) -> tuple[Tensor, Tensor | None]:
        """Events -> rows: the summaries between them."""
        length, tokens = self.segments.length, self.segments.tokens
        blocks = rows.summaries.numel() // tokens
        summaries = self.summaries.expand(blocks, -1, -1)  # [blocks, tokens, width]
        # over the root of their number: of the size of one event, if they have nothing in common
        if self.segment_pooling:
            # [blocks, length]
            events = rows.last_events[::tokens, None] + torch.arange(1 - length, 1, device=x.device)
            pooled = (
                x.index_select(0, events.flatten())
                .view(blocks, length, self.width)
                .sum(1, keepdim=True)
            )
            summaries = summaries + pooled * length**-0.5
        summaries = summaries.reshape(-1, self.width) + self.position[rows.summary_positions]
        order = rows.order
        x = torch.cat([x, summaries])
        x = torch.empty_like(x).index_copy(0, order, x)
        if timestamps is not None:
            timestamps = torch.cat([timestamps, timestamps.index_select(0, rows.last_events)])
            timestamps = torch.empty_like(timestamps).index_copy(0, order, timestamps)
        return x, timestamps


class EarlierSegments:
    """Attends from a layer's rows to the summaries of earlier segments.

    Args:
        rows: Where events and summaries stand.
        memory: Summaries of segments before the first row.
        weight: How many events a summary counts for.
        keep: Whether to keep the keys and values of all summaries, layer by layer, in `kept`.
    """

    def __init__(
        self, rows: Rows, memory: Memory | None, weight: float, keep: bool = False
    ) -> None:
        self.rows, self.memory, self.weight = rows, memory, weight
        self.kept: list[tuple[Tensor, Tensor]] | None = [] if keep else None
        self._order: Tensor | None = None
        if memory is not None and not rows.open:  # remembered ones first, sample by sample
            plan, tokens = rows.plan, rows.plan.segments.tokens
            owners = [
                np.repeat(np.arange(len(count)), count * tokens)
                for count in (plan.known, plan.closed)
            ]
            self._order = upload(
                np.argsort(np.concatenate(owners), kind="stable"), rows.lengths.device
            )

    def attend(
        self, layer: HSTULayer, plan: AttentionPlan | TilePlan, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor | None:
        """q [rows, heads, d_qk], k, v -> [rows, heads, d_v]; None without summaries."""
        k, v = self._collect_summaries(layer, k, v)
        if self.kept is not None:
            self.kept.append((k, v))
        if not k.shape[0]:
            return None
        scale_length = layer.max_length / self.weight
        return attend_to_summaries(
            plan, q, k, v, self.rows.plan, scale_length=scale_length, alpha=layer.d_qk**-0.5
        )

    def _collect_summaries(self, layer: HSTULayer, *of_rows: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [summaries, heads, d]: those of the rows and the remembered ones."""
        if self.memory is None:
            return tuple(part.index_select(0, self.rows.summaries) for part in of_rows)
        remembered = self.memory.keys[layer.number], self.memory.values[layer.number]
        if self._order is None:
            return remembered
        found = [part.index_select(0, self.rows.summaries) for part in of_rows]
        return tuple(
            torch.cat(pair).index_select(0, self._order)
            for pair in zip(remembered, found, strict=True)
        )
