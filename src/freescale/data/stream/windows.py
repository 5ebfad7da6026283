"""Which window an event belongs to: a function of what its partition has held until then.

Time stands, for each clock (a partition, or all files), at its latest event so far less the allowed
lateness. A window is over when the clocks of all partitions have passed its end. An event whose
window its own clock had passed is late: it goes to the first window that this clock has not passed,
at its beginning, or is dropped. So neither how partitions interleave nor when they are read makes a
difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freescale.data.stream.source import Chunk

_BEFORE = np.iinfo(np.int64).min // 4  # before all times
_Ints = NDArray[np.int64]


@dataclass
class WindowRule:
    """Assigns events to windows.

    Attributes:
        length: of a window, in the unit of the times.
        lateness: how much earlier than the latest one an event may be.
        drops: whether late events are dropped.
        oldest: late events of more windows ago are dropped in any case; None: none are.
        tops: time of the latest event of each clock.
        closed: the last window that is over.
        late: number of late events by the window that they went to.
        dropped: the same of those that were dropped, by the window that they would have gone to.
    """

    length: int
    lateness: int = 0
    drops: bool = False
    oldest: int | None = None
    tops: dict[str, int] = field(default_factory=dict)
    closed: int = _BEFORE
    late: Counter[int] = field(default_factory=Counter)
    dropped: Counter[int] = field(default_factory=Counter)

    def assign(self, chunk: Chunk) -> tuple[_Ints, _Ints, NDArray[np.bool_]]:
        """Windows [events] and times [events] of a chunk, and which events [events] are kept."""
        times: _Ints = chunk.events.columns["timestamp"]
        top = self.tops.get(chunk.clock, _BEFORE)
        before = np.full(len(times), top)
        if not chunk.whole:
            before[1:] = np.maximum.accumulate(np.append(top, times[:-1]))[1:]
        own = times // self.length
        first = np.maximum((before - self.lateness) // self.length, self.closed + 1)
        late = own < first
        windows, kept = np.maximum(own, first), np.ones(len(times), bool)
        if self.drops:
            kept = ~late
        elif self.oldest is not None:
            kept = first - own <= self.oldest
        self.late.update(windows[late & kept].tolist())
        self.dropped.update(windows[~kept].tolist())
        self.tops[chunk.clock] = max(top, int(times.max(initial=_BEFORE)))
        return windows, np.where(late, windows * self.length, times), kept

    def find_open(self, clock: str) -> int:
        """The first window that a clock has not passed."""
        return (self.tops.get(clock, _BEFORE) - self.lateness) // self.length

    def list_ahead(self, clocks: Iterable[str], windows: int) -> list[str]:
        """Clocks that are ahead of the slowest one by more than some windows."""
        first = {clock: self.find_open(clock) for clock in clocks}
        return [c for c, number in first.items() if number > min(first.values()) + windows]
