"""Positions of the events and the summaries of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.batch import HostSizes, compute_offsets, concat_ranges
from freescale.kernels.attention.checks import read_sizes
from freescale.kernels.layer.reference import compute_positions
from freescale.kernels.summary_attention.plan import SummaryPlan
from freescale.kernels.upload import upload
from freescale.segments import Segments


@dataclass(frozen=True)
class Rows:
    """Positions of the events (candidates included) and the summaries of a batch.

    All of it lies on the batch's device, except `host` and `plan`.
    """

    # [parts] int64: rows of each segment and open part, which attend like samples of their own
    parts: Tensor
    candidate_counts: Tensor | None  # [parts]
    host: HostSizes  # the same
    lengths: Tensor  # [samples] int64: rows
    events: Tensor  # [events] int64: row of each
    # [events]: events before it in its history; candidates stand right after theirs
    event_positions: Tensor
    summaries: Tensor  # [summaries] int64: row of each
    summary_positions: Tensor  # [summaries]: the start of the next segment
    last_events: Tensor  # [summaries]: the last event of its segment, which gives it its time
    longest_history: int  # earlier events included
    plan: SummaryPlan

    @property
    def order(self) -> Tensor:
        """[rows]: destinations of the events, then of the summaries."""
        return torch.cat([self.events, self.summaries])

    @property
    def open(self) -> bool:
        """No segment is full: the rows are the events, in their order."""
        return not self.summaries.numel()


def arrange_rows(
    segments: Segments,
    lengths: Tensor,
    candidate_counts: Tensor | None,
    host: HostSizes | None,
    known: np.ndarray | None = None,
) -> Rows:
    """Arranges events and summaries in rows.

    `lengths` [samples] include `candidate_counts` [samples]. `host` has the same sizes; what it
    lacks is read from the device. `known` [samples] segments come before the first event. Raises
    ValueError if lengths and candidate counts do not fit each other.
    """
    sizes = read_sizes(lengths, candidate_counts, host)
    device, length, tokens = lengths.device, segments.length, segments.tokens
    known = np.zeros_like(sizes.lengths) if known is None else known
    closed_host = segments.count_closed(sizes.history)
    plan = SummaryPlan(segments, sizes.lengths + closed_host * tokens, closed_host, known)
    before = upload(known * length, device)  # [samples] events
    history = lengths if candidate_counts is None else lengths - candidate_counts
    longest_history = int((sizes.history + known * length).max(initial=0))
    events = int(sizes.lengths.sum())

    def repeat_each(of_sample: Tensor, counts: Tensor, total: int) -> Tensor:
        return torch.repeat_interleave(of_sample, counts, output_size=total)

    # typical of requests with a memory: small, so work per row counts
    if not closed_host.any():
        positions, none = concat_ranges(before, lengths, events), lengths.new_empty(0)
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
            else torch.minimum(positions, repeat_each(before + history, lengths, events)),
            summaries=none,
            summary_positions=none,
            last_events=none,
            longest_history=longest_history,
            plan=plan,
        )
    closed = segments.count_closed(history)
    row_lengths = lengths + closed * tokens
    row_starts, event_starts = compute_offsets(row_lengths)[:-1], compute_offsets(lengths)[:-1]
    slot = compute_positions(lengths, events)
    # of the segment that the event is in
    number = torch.minimum(slot // length, repeat_each(closed, lengths, events))
    counts, total = closed * tokens, int(closed_host.sum()) * tokens
    place = compute_positions(counts, total)  # index of a summary in its sample
    own = place // tokens  # segment
    parts = segments.split_rows(sizes.lengths, sizes.history)
    assert parts.candidate_counts is not None
    span = None if host is None else host.time_span
    return Rows(
        parts=upload(parts.lengths.numpy(), device),
        candidate_counts=None
        if candidate_counts is None
        else upload(parts.candidate_counts.numpy(), device),
        host=HostSizes(
            parts.lengths, None if candidate_counts is None else parts.candidate_counts, span
        ),
        lengths=row_lengths,
        events=repeat_each(row_starts, lengths, events) + slot + number * tokens,
        event_positions=torch.minimum(slot, repeat_each(history, lengths, events))
        + repeat_each(before, lengths, events),
        summaries=repeat_each(row_starts, counts, total)
        + own * segments.period
        + length
        + place % tokens,
        summary_positions=(own + 1) * length + repeat_each(before, counts, total),
        last_events=repeat_each(event_starts, counts, total) + (own + 1) * length - 1,
        longest_history=longest_history,
        plan=plan,
    )
