"""Reads the columns of a batch that the heads need, and checks that they fit each other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch


def find_sequence(batch: SequenceBatch, name: str, like: Jagged | None = None) -> Jagged:
    """A sequence of the batch, checked to have the lengths of `like`."""
    if name not in batch.sequences:
        raise ValueError(
            f"the batch has no sequence {name!r}; it has "
            f"{', '.join(sorted(batch.sequences)) or 'none'}"
        )
    part = batch.sequences[name]
    part.check(name)
    if like is None or part.lengths is like.lengths:
        return part
    own, theirs = part.host_lengths, like.host_lengths
    if not torch.equal(own, theirs):
        sample = int((own != theirs).nonzero()[0])
        raise ValueError(
            f"{name!r} has {int(own[sample])} values in sample {sample}, "
            f"what it goes with has {int(theirs[sample])}; they must be equal"
        )
    return part


def measure_time_span(*parts: Jagged) -> int | None:
    """The longest time between two events of a sample, over all parts; None if the host does not
    know the times."""
    hosts = [part.host for part in parts if part.host is not None]
    if len(hosts) < len(parts):
        return None
    if len(hosts) == 1 and hosts[0].span is not None:
        return hosts[0].span
    ends = np.iinfo(np.int64)
    low, high = np.full(len(parts[0]), ends.max), np.full(len(parts[0]), ends.min)
    for host in hosts:
        lengths, times = host.lengths.numpy(), host.values.numpy()
        some = lengths > 0
        starts = (np.cumsum(lengths) - lengths)[some]
        if starts.size:
            low[some] = np.minimum(low[some], np.minimum.reduceat(times, starts))
            high[some] = np.maximum(high[some], np.maximum.reduceat(times, starts))
    some = high >= low
    return int((high[some] - low[some]).max(initial=0))


def sum_values(rows: Tensor, of: Jagged) -> Tensor:
    """[values, width] -> [candidates, width]: the sum of each candidate's rows, in an order that is
    fixed on every device."""
    if not rows.shape[0]:
        return torch.cat([rows, rows.new_zeros(len(of), rows.shape[1])])
    # unsafe: torch would check the lengths where they are, on the device; the host has checked them
    return torch.segment_reduce(rows, "sum", lengths=of.lengths, axis=0, initial=0.0, unsafe=True)


def find_candidates(batch: SequenceBatch) -> Nested:
    if "candidates" not in batch.candidates:
        raise ValueError(
            f"the batch has no 'candidates'; it has {', '.join(sorted(batch.candidates)) or 'none'}"
        )
    batch.candidates["candidates"].check("candidates")
    return batch.candidates["candidates"]
