"""The channels of a transport. Those that were released are handed out again: many pipelines, one
after another, take no more connections, threads and memory than one does.

Ranks agree on which: a channel is used again where every rank has released it after as many
exchanges, none of which failed or is still under way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Generic, TypeVar

from freescale.transport.api import Gather

_T = TypeVar("_T")


@dataclass
class ExchangeCount:
    """Exchanges that a channel began, and those of them that were waited for and succeeded."""

    begun: int = 0
    ended: int = 0


@dataclass
class _Entry(Generic[_T]):
    made: _T
    urgent: bool
    exchanges: ExchangeCount


class ChannelPool(Generic[_T]):
    """Numbered in the order in which they were opened: the same on every rank."""

    def __init__(self) -> None:
        self._open: dict[int, _Entry[_T]] = {}
        self._released: dict[int, _Entry[_T]] = {}
        self._lost: set[int] = set()  # that some rank closed, as far as this one knows
        self._to_tell: list[int] = []  # of them, those that this rank did
        self._count = 0

    def add(self, made: _T, urgent: bool, exchanges: ExchangeCount) -> None:
        self._open[self._count] = _Entry(made, urgent, exchanges)
        self._count += 1

    def reuse(self, urgent: bool, gather: Gather) -> tuple[_T | None, list[_T]]:
        """Opens a released channel again. A collective. Returns the first channel that can be used
        again or None, and released channels that never can, because a rank closed its end."""
        mine = {str(number): channel.exchanges.begun for number, channel in self._released.items()}
        found = [
            json.loads(answer) for answer in gather(json.dumps([mine, self._to_tell]).encode())
        ]
        self._to_tell = []
        self._lost |= {number for _, numbers in found for number in numbers}
        ended = [
            self._released.pop(number).made for number in sorted(self._lost & self._released.keys())
        ]
        for number, channel in sorted(self._released.items(), key=lambda item: item[0]):
            if channel.urgent == urgent and all(
                begun.get(str(number)) == channel.exchanges.begun for begun, _ in found
            ):
                self._open[number] = self._released.pop(number)
                return channel.made, ended
        return None, ended

    def release(self, made: _T) -> bool:
        """Takes a channel back. Returns whether it is kept; otherwise the caller closes it.
        ValueError if it is not open, or not of this pool."""
        number = next(
            (number for number, channel in self._open.items() if channel.made is made), None
        )
        if number is None:
            raise ValueError(
                "this channel is not open: it was released before, or is another transport's"
            )
        channel = self._open.pop(number)
        if number in self._lost:
            return False
        if channel.exchanges.begun != channel.exchanges.ended:
            self._lost.add(number)
            self._to_tell.append(number)
            return False
        self._released[number] = channel
        return True

    def list_all(self) -> list[_T]:
        """Open and released ones."""
        return [channel.made for channel in (*self._open.values(), *self._released.values())]
