"""What is left of old segments, and how a history is split into old and recent events."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from freescale.batch import Jagged, SequenceBatch, concat_ranges


@dataclass(frozen=True)
class Memory:
    """The keys and values of the summaries of old segments, layer by layer."""

    segments: Tensor  # [samples] int64, on the CPU: how many of each sample
    keys: tuple[Tensor, ...]  # [summaries, heads, d_qk] each, sample after sample
    values: tuple[Tensor, ...]  # [summaries, heads, d_v]


def split_history(batch: SequenceBatch, segment: int) -> tuple[SequenceBatch, SequenceBatch]:
    """Splits "history" into old events, whole segments that can be compressed, and recent ones.

    Returns the batch of old events, and the batch of recent events (at least one if there is one)
    with all other features.
    """
    history = batch.sequences["history"]
    old = (history.lengths - 1).clamp(min=0) // segment * segment
    index = (
        concat_ranges(history.offsets[:-1], old),
        concat_ranges(history.offsets[:-1] + old, history.lengths - old),
    )
    lengths = old, history.lengths - old
    names = [name for name in ("history", "actions", "timestamps") if name in batch.sequences]
    past, present = (
        {name: Jagged(batch.sequences[name].values[at], count) for name in names}
        for at, count in zip(index, lengths, strict=True)
    )
    recent = replace(batch, sequences={**batch.sequences, **present}, packing=None)
    return SequenceBatch(past, keys=batch.keys, number=batch.number), recent
