"""What is left of old segments, and how a history is split into old and recent events."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freescale.batch import Jagged, SequenceBatch, concat_ranges


@dataclass(frozen=True)
class Memory:
    """What is left of old segments: the keys and values of their summaries, in each layer."""

    segments: Tensor  # [samples] int64, on the CPU: how many of each sample
    keys: tuple[Tensor, ...]  # [summaries, heads, d_qk] each, sample after sample
    values: tuple[Tensor, ...]  # [summaries, heads, d_v]


def split_history(batch: SequenceBatch, segment: int) -> tuple[SequenceBatch, SequenceBatch]:
    """The old events of each sample, whole segments that can be compressed, and the recent ones: at
    least one where there is one.

    Whatever else the batch holds goes with the recent ones."""
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
    recent = SequenceBatch(
        {**batch.sequences, **present},
        batch.candidates,
        batch.dense,
        batch.weights,
        batch.keys,
        batch.number,
    )
    return SequenceBatch(past, keys=batch.keys, number=batch.number), recent
