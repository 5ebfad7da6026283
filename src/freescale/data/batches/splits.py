"""Which events of a history belong to a part of the data: train, validation or test."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.data.batches.specs import SplitSpec
from freescale.data.histories import RowGroup

# Fewest events of a user that can be trained on: one and a target, and two if these are held out.
LEAST_EVENTS = {"leave-one-out": 4, "none": 2}
WANTED = (
    f"leave-one-out needs users with {LEAST_EVENTS['leave-one-out']} or more events, "
    f"--split none with {LEAST_EVENTS['none']}"
)


class Window(NamedTuple):
    """The events that samples need, each [samples] int64 into the events of a row group."""

    begin: NDArray[Any]
    end: NDArray[Any]
    tail: NDArray[Any]  # how many at the end are beyond the history: targets or candidates


def find_ends(split: SplitSpec, group: RowGroup, part: str) -> NDArray[Any]:
    """[users]: where the part of each history ends, its first target included."""
    start: NDArray[np.int64] = group.offsets[:-1]
    stop: NDArray[np.int64] = group.offsets[1:]
    if split.kind == "none":
        return stop
    if split.kind == "leave-one-out":
        held_out = {"train": 2, "validation": 1, "test": 0}[part]
        return np.asarray(np.maximum(stop - held_out, start))
    cut = _find_cuts(split, group)
    if part == "test":
        return np.where(cut < stop, cut + 1, start)
    behind = part == "train" and split.kind == "time"  # the target of the validation part
    return np.asarray(np.maximum(cut - behind, start))


def count_new(split: SplitSpec, group: RowGroup) -> NDArray[Any]:
    """[users]: how many events at the end of the train part are later than `split.since`, and have
    an event before them."""
    start, ends = group.offsets[:-1], find_ends(split, group, "train")
    behind: NDArray[np.int64] = np.maximum(ends - start - 1, 0)
    if split.since is None:
        return behind
    later = np.concatenate([[0], np.cumsum(group.values["timestamp"] > split.since)])
    return np.asarray(np.minimum(later[ends] - later[start], behind))


def find_later(split: SplitSpec, group: RowGroup, most: int) -> NDArray[Any]:
    """[users]: how many events follow the first target of the test part, at most `most`. Only a
    split by time has any, and only if there is a history before the target."""
    start, stop = group.offsets[:-1], group.offsets[1:]
    if split.kind != "time":
        return np.zeros_like(start)
    cut = _find_cuts(split, group)
    return np.where(cut > start, np.clip(stop - cut - 1, 0, most), 0)


def _find_cuts(split: SplitSpec, group: RowGroup) -> NDArray[Any]:
    """[users]: the first event at or after the split time."""
    start, stop = group.offsets[:-1], group.offsets[1:]
    earlier = np.concatenate([[0], np.cumsum(group.values["timestamp"] < split.time)])
    return np.asarray(start + earlier[stop] - earlier[start])


def find_window(
    start: NDArray[Any], end: NDArray[Any], max_length: int, tail: int | NDArray[Any]
) -> Window:
    """Finds the events that samples [samples] need, from `start` to at most `end` of their part.

    At most `tail` events (of all or of each sample) are beyond the history, fewer if it would be
    empty otherwise. A sample whose part has fewer than two events has an empty window.
    """
    usable = end - start >= 2
    tails = np.where(usable, np.minimum(tail, end - start - 1), 0)
    begin = np.where(usable, np.maximum(start, end - tails - max_length), end)
    return Window(begin, end, tails)
