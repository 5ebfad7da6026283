"""HSTU over histories cut into segments, with learned summaries between them (PerSRec, arXiv
2601.03479).

Who sees whom is in `kernels.segments`. Summaries stand among the events inside the encoder only; no
head ever has them, so there is no loss at them, and the last event of a segment predicts the next
event. Served, the old segments are run once (`compress`); of them the summaries' keys and values
stay, and a request computes its recent events alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.batch import HostSizes, Jagged, SequenceBatch, offsets_of, ranges
from freescale.config import ModelConfig
from freescale.kernels.attention_checks import read_sizes
from freescale.kernels.dispatch import summaries_attended
from freescale.kernels.launch import uploaded
from freescale.kernels.reference.attention import AttentionPlan
from freescale.kernels.triton.attention_plan import TilePlan
from freescale.models.hstu import HSTU, TOO_LONG, HSTULayer, positions_in_sample
from freescale.segments import Segments, SummaryPlan


@dataclass(frozen=True)
class Memory:
    """What is left of old segments: the keys and values of their summaries, in each layer."""

    segments: Tensor  # [samples] int64, on the CPU: how many of each sample
    keys: tuple[Tensor, ...]  # [summaries, heads, d_qk] each, sample after sample
    values: tuple[Tensor, ...]  # [summaries, heads, d_v]


@dataclass(frozen=True)
class Rows:
    """Where the events (candidates included) and the summaries of a batch stand. All of it on the
    batch's device but the plan."""

    # [parts] int64: rows of each segment and open part, which attend like samples of their own
    parts: Tensor
    candidate_counts: Tensor | None  # [parts]
    host: HostSizes  # the same
    lengths: Tensor  # [samples] int64: rows
    events: Tensor  # [events] int64: row of each
    # [events]: events before it in its history; candidates stand right after theirs
    event_positions: Tensor
    summaries: Tensor  # [summaries] int64: row of each
    summary_positions: Tensor  # [summaries]: a summary stands where the next segment begins
    last_events: Tensor  # [summaries]: the last event of its segment, which gives it its time
    longest_history: int  # with what came before
    plan: SummaryPlan

    @property
    def order(self) -> Tensor:
        """[rows]: where events and then summaries go."""
        return torch.cat([self.events, self.summaries])

    @property
    def open(self) -> bool:
        """No segment is full: the rows are the events, in their order."""
        return not self.summaries.numel()


def arrange(
    segments: Segments,
    lengths: Tensor,
    candidate_counts: Tensor | None,
    host: HostSizes | None,
    known: np.ndarray | None = None,
) -> Rows:
    """Rows for samples of these lengths (candidates included) that `known` [samples] segments come
    before. Reads from the device what `host` does not know."""
    sizes = read_sizes(lengths, candidate_counts, host)
    device, length, tokens = lengths.device, segments.length, segments.tokens
    known = np.zeros_like(sizes.lengths) if known is None else known
    closed_host = segments.closed(sizes.history)
    plan = SummaryPlan(segments, sizes.lengths + closed_host * tokens, closed_host, known)
    before = uploaded(known * length, device)  # [samples] events
    history = lengths if candidate_counts is None else lengths - candidate_counts
    longest_history = int((sizes.history + known * length).max(initial=0))
    events = int(sizes.lengths.sum())

    def each(of_sample: Tensor, counts: Tensor, total: int) -> Tensor:
        return torch.repeat_interleave(of_sample, counts, output_size=total)

    # as requests with a memory are: small, so that what is found of each row counts
    if not closed_host.any():
        positions, none = ranges(before, lengths, events), lengths.new_empty(0)
        return Rows(
            parts=lengths,
            candidate_counts=candidate_counts,
            host=host
            or HostSizes(
                torch.from_numpy(sizes.lengths),
                None if candidate_counts is None else candidate_counts.cpu(),
            ),
            lengths=lengths,
            events=torch.arange(events, device=device),
            event_positions=positions
            if history is lengths
            else torch.minimum(positions, each(before + history, lengths, events)),
            summaries=none,
            summary_positions=none,
            last_events=none,
            longest_history=longest_history,
            plan=plan,
        )
    closed = segments.closed(history)
    row_lengths = lengths + closed * tokens
    row_starts, event_starts = offsets_of(row_lengths)[:-1], offsets_of(lengths)[:-1]
    slot = positions_in_sample(lengths, events)
    # of the segment that the event is in
    number = torch.minimum(slot // length, each(closed, lengths, events))
    counts, total = closed * tokens, int(closed_host.sum()) * tokens
    place = positions_in_sample(counts, total)  # of a summary among its sample's
    own = place // tokens  # segment
    parts = segments.parts(sizes)
    assert parts.candidate_counts is not None
    span = None if host is None else host.time_span
    return Rows(
        parts=uploaded(parts.lengths.numpy(), device),
        candidate_counts=None
        if candidate_counts is None
        else uploaded(parts.candidate_counts.numpy(), device),
        host=HostSizes(
            parts.lengths, None if candidate_counts is None else parts.candidate_counts, span
        ),
        lengths=row_lengths,
        events=each(row_starts, lengths, events) + slot + number * tokens,
        event_positions=torch.minimum(slot, each(history, lengths, events))
        + each(before, lengths, events),
        summaries=each(row_starts, counts, total) + own * segments.period + length + place % tokens,
        summary_positions=(own + 1) * length + each(before, counts, total),
        last_events=each(event_starts, counts, total) + (own + 1) * length - 1,
        longest_history=longest_history,
        plan=plan,
    )


class _Earlier:
    """What a layer's rows see of earlier segments. Keeps the keys and values of all summaries, if
    asked to."""

    def __init__(
        self, rows: Rows, memory: Memory | None, weight: float, keep: bool = False
    ) -> None:
        self.rows, self.memory, self.weight = rows, memory, weight
        self.kept: list[tuple[Tensor, Tensor]] | None = [] if keep else None
        self._order: Tensor | None = None
        if memory is not None and not rows.open:  # remembered ones before those of the same sample
            plan, tokens = rows.plan, rows.plan.segments.tokens
            owners = [
                np.repeat(np.arange(len(count)), count * tokens)
                for count in (plan.known, plan.closed)
            ]
            self._order = uploaded(
                np.argsort(np.concatenate(owners), kind="stable"), rows.lengths.device
            )

    def attended(
        self, layer: HSTULayer, plan: AttentionPlan | TilePlan, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor | None:
        k, v = self._summaries(layer, k, v)
        if self.kept is not None:
            self.kept.append((k, v))
        if not k.shape[0]:
            return None
        scale_length = layer.max_length / self.weight
        return summaries_attended(
            plan, q, k, v, self.rows.plan, scale_length=scale_length, alpha=layer.d_qk**-0.5
        )

    def _summaries(self, layer: HSTULayer, *of_rows: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [summaries, heads, d] of all summaries, from those of the rows and the
        remembered ones."""
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
        memory: Memory | None = None,  # of what came before the first of these events
    ) -> Tensor:  # [tokens, width]
        rows = self._arranged(x, lengths, candidate_counts, host, memory)
        outputs = self._run(x, rows, _Earlier(rows, memory, self.segment_weight), keys, timestamps)
        return outputs if rows.open else outputs.index_select(0, rows.events)

    @torch.no_grad()
    def compress(
        self,
        x: Tensor,  # [events, width]
        lengths: Tensor,  # [samples] int64, whole segments
        timestamps: Tensor | None = None,
        host: HostSizes | None = None,
        memory: Memory | None = None,
    ) -> Memory:
        """What later events will see of these, and of `memory` before them."""
        rows = self._arranged(x, lengths, None, host, memory)
        plan = rows.plan
        rest = plan.lengths - plan.closed * self.segments.period
        if rest.any():
            sample = int(rest.argmax())
            raise ValueError(
                f"sample {sample} has {rest[sample]} events after its last full segment of "
                f"{self.segments.length}: "
                "compress whole segments and score with the rest"
            )
        earlier = _Earlier(rows, memory, self.segment_weight, keep=True)
        self._run(x, rows, earlier, None, timestamps)
        assert earlier.kept is not None
        keys, values = zip(*earlier.kept, strict=True)
        return Memory(torch.from_numpy(plan.known + plan.closed), keys, values)

    def _arranged(
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
        rows = arrange(self.segments, lengths, candidate_counts, host, known)
        if rows.events.numel() != x.shape[0]:
            raise ValueError(
                f"lengths add up to {rows.events.numel()}, but there are {x.shape[0]} tokens"
            )
        if rows.longest_history > self.max_length:
            raise ValueError(TOO_LONG.format(rows.longest_history, self.max_length))
        return rows

    def _run(
        self,
        x: Tensor,
        rows: Rows,
        earlier: _Earlier,
        keys: Tensor | None,
        timestamps: Tensor | None,
    ) -> Tensor:
        """[events, width] -> [rows, width]."""
        timestamps = self._checked(x, timestamps)
        x = x.to(self.position.dtype) + self.position[rows.event_positions]
        # in training the summaries have a gradient in every batch, if only zeros
        if not rows.open or torch.is_grad_enabled():
            x, timestamps = self._interleaved(x, timestamps, rows)
        plan = self._plan(rows.parts, rows.candidate_counts, timestamps, rows.host)
        slots = positions_in_sample(rows.lengths, x.shape[0]) if self.drops else None
        token_keys = self._token_keys(keys, rows.lengths, slots)
        return self._through(
            x, rows.parts, token_keys, timestamps, rows.candidate_counts, plan, earlier
        )

    def _interleaved(
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


def split_history(batch: SequenceBatch, segment: int) -> tuple[SequenceBatch, SequenceBatch]:
    """The old events of each sample, whole segments that can be compressed, and the recent ones: at
    least one where there is one.

    Whatever else the batch holds goes with the recent ones."""
    history = batch.sequences["history"]
    old = (history.lengths - 1).clamp(min=0) // segment * segment
    index = (
        ranges(history.offsets[:-1], old),
        ranges(history.offsets[:-1] + old, history.lengths - old),
    )
    lengths = old, history.lengths - old
    names = [name for name in ("history", "actions", "timestamps") if name in batch.sequences]
    past, present = (
        {name: Jagged(batch.sequences[name].values[at], count) for name in names}
        for at, count in zip(index, lengths, strict=True)
    )
    recent = SequenceBatch(
        {**batch.sequences, **present},
        batch.candidates,
        batch.dense,
        batch.weights,
        batch.keys,
        batch.number,
    )
    return SequenceBatch(past, keys=batch.keys, number=batch.number), recent
