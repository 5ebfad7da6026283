"""Which events of a store a batch reads: index arrays into its segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from freescale.data.ranges import list_ranges
from freescale.data.store.segment import Segment


class Located(NamedTuple):
    """Where the events of users [n] are, each [segments, n]."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] events of each user, in all segments."""
        return np.asarray(self.counts.sum(0), np.int64)

    def of(self, low: int, high: int) -> Located:
        """Of some of the users."""
        return Located(self.starts[:, low:high], self.counts[:, low:high])


def locate(segments: Sequence[Segment], users: NDArray[np.int64]) -> Located:
    """Finds users [n], as often as they occur."""
    found = [segment.locate(users) for segment in segments]
    starts, counts = zip(*found, strict=True)
    return Located(np.stack(starts), np.stack(counts))


@dataclass(frozen=True)
class _Part:
    """Some events of one segment, and their places among all events of the selection."""

    segment: Segment
    index: NDArray[np.int64]
    place: NDArray[np.int64] | slice


@dataclass(frozen=True)
class Selection:
    """Events of a store, one user after another."""

    parts: tuple[_Part, ...]
    total: int

    def read(self, name: str, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """[total] values of a column. `dtype`: by default one that all segments fit."""
        columns = [part.segment.column(name) for part in self.parts]
        if dtype is None:
            dtype = np.result_type(*columns) if columns else np.int64
        values = np.empty(self.total, dtype)
        for part, column in zip(self.parts, columns, strict=True):
            values[part.place] = column[part.index]
        return values

    def keep(self, mask: NDArray[np.bool_]) -> Selection:
        """The events of a mask [total], in the same order."""
        total = int(np.count_nonzero(mask))
        if len(self.parts) == 1:
            (part,) = self.parts
            return Selection((_Part(part.segment, part.index[mask], slice(0, total)),), total)
        places, parts = np.cumsum(mask), []
        for part in self.parts:
            kept = mask[part.place]
            parts.append(_Part(part.segment, part.index[kept], places[part.place][kept] - 1))
        return Selection(tuple(parts), total)

    @staticmethod
    def concat(selections: Iterable[Selection]) -> Selection:
        """The events of several, one selection after another."""
        parts, total = [], 0
        for each in selections:
            for part in each.parts:
                place = part.place
                moved = (
                    slice(place.start + total, place.stop + total)
                    if isinstance(place, slice)
                    else place + total
                )
                parts.append(_Part(part.segment, part.index, moved))
            total += each.total
        return Selection(tuple(parts), total)


def select(
    segments: Sequence[Segment],
    located: Located,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> Selection:
    """The events [begin, end) of users [n], counted over all segments: [sum(end - begin)]. A loop
    over segments, whatever the number of users."""
    lengths = end - begin
    offsets, before = np.cumsum(lengths) - lengths, np.zeros_like(begin)
    parts, total = [], int(lengths.sum())
    for segment, starts, counts in zip(segments, *located, strict=True):
        low, high = np.clip(begin - before, 0, counts), np.clip(end - before, 0, counts)
        here = high - low
        if (count := int(here.sum())) == total:
            place: NDArray[np.int64] | slice = slice(0, total)
        else:
            place = list_ranges(offsets + before + low - begin, here)
        if count:
            parts.append(_Part(segment, list_ranges(starts + low, here), place))
        before = before + counts
    return Selection(tuple(parts), total)
