"""Which events of a history belong to a part of the data: train, validation or test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.data.histories import RowGroup

PARTS = ("train", "validation", "test")
SPLITS = ("leave-one-out", "time", "none")
# Events of a user who is trained on: one, and a target; with two more where these are held out.
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


@dataclass(frozen=True)
class Split:
    """How histories are divided; `loader.Histories` shows the table of all splits.

    Args:
        kind: One of `SPLITS`.
        time: With kind `time`: events at or after it are held out.
    """

    kind: str
    time: int | None

    def find_ends(self, group: RowGroup, part: str) -> NDArray[Any]:
        """[users]: where the part of each history ends, its first target included."""
        start: NDArray[np.int64] = group.offsets[:-1]
        stop: NDArray[np.int64] = group.offsets[1:]
        if self.kind == "none":
            return stop
        if self.kind == "leave-one-out":
            held_out = {"train": 2, "validation": 1, "test": 0}[part]
            return np.asarray(np.maximum(stop - held_out, start))
        cut = self._find_cuts(group)
        if part == "test":
            return np.where(cut < stop, cut + 1, start)
        return np.asarray(np.maximum(cut - (part == "train"), start))

    def find_later(self, group: RowGroup, most: int) -> NDArray[Any]:
        """[users]: how many events follow the first target of the test part, at most `most`: those
        of a split by time. None follow without a history before it."""
        start, stop = group.offsets[:-1], group.offsets[1:]
        if self.kind != "time":
            return np.zeros_like(start)
        cut = self._find_cuts(group)
        return np.where(cut > start, np.clip(stop - cut - 1, 0, most), 0)

    def _find_cuts(self, group: RowGroup) -> NDArray[Any]:
        """[users]: the first event at or after the split."""
        start, stop = group.offsets[:-1], group.offsets[1:]
        earlier = np.concatenate([[0], np.cumsum(group.values["timestamp"] < self.time)])
        return np.asarray(start + earlier[stop] - earlier[start])


def find_window(
    start: NDArray[Any], end: NDArray[Any], max_length: int, tail: int | NDArray[Any]
) -> Window:
    """Finds the events that samples need.

    A sample whose part has fewer than two events has an empty window.

    Args:
        start: [samples] first event of each history.
        end: [samples] where its part ends.
        max_length: Of the history.
        tail: Events beyond the history, at most, of all or of each sample; fewer where the history
            would be empty.
    """
    usable = end - start >= 2
    tails = np.where(usable, np.minimum(tail, end - start - 1), 0)
    begin = np.where(usable, np.maximum(start, end - tails - max_length), end)
    return Window(begin, end, tails)
