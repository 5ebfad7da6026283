"""Where events come from: partitions, each with an order of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.stream.parsing import Events

LOWEST = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Chunk:
    """Some events of a partition, next to each other.

    Attributes:
        clock: which events count as read before each other: the file's folder, or the partition.
        partition: its name in manifests: a file, or a number.
        offsets: [events] places in the partition.
        whole: whether time stands still within the chunk: no event of a file is late because of
            another one in it.
        arrived: when it came, in seconds since 1970.
    """

    clock: str
    partition: str
    offsets: NDArray[np.int64]
    events: Events
    whole: bool
    arrived: float


class Source(ABC):
    """Yields chunks. What was read before is known by `position`, never by the source itself."""

    name: str  # the source as the user gives it
    ages: bool = False  # there are several clocks, and the slowest one decides
    repeated = 0  # events that came again, at a place that was read

    @abstractmethod
    def poll(self, seconds: float) -> Sequence[Chunk]:
        """The next chunks; nothing if none has come in this time. ValueError: what was read has
        changed, or cannot be understood."""

    def position(self) -> dict[str, Any]:
        """What has been read since `open` or the last call, as plain JSON: a part of the next
        manifest."""
        return {}

    def restore(self, position: Mapping[str, Any]) -> None:  # noqa: B027
        """Goes on behind a position; called for each manifest, in order."""

    @property
    def clocks(self) -> list[str]:
        """Whose times decide what is over."""
        return [""]

    def rank(self, partition: str) -> Any:
        """The order of partitions among events of equal time."""
        return partition

    def hold(self, ahead: Sequence[str]) -> None:  # noqa: B027 - a folder is read file by file
        """Reads no more of some clocks for now, because others lag behind them."""

    def close(self) -> None:  # noqa: B027
        """Gives up connections."""
