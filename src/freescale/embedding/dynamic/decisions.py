"""Decisions about the batches of a dynamic table: which rows came and which went. They are
provisional until the step of their batch begins.

Decisions for the batches t and t+1 are made before the step of t is over. Each of them can be
undone and redone: a `Decision` keeps the rows that it replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic.draws import BatchDraws, DrawCounts

_KEPT = 2  # decisions: of the batch that computes, and of the one after it


@dataclass
class Decision:
    """About one batch."""

    changes: Any  # of the directory; like the rest None until the device has decided
    removed: Tensor | None  # entries that were swept
    slots: Tensor  # [m] of the rows that came
    rows: dict[str, Tensor]  # [m or more, ...] in their place in the other state
    draws: BatchDraws | None = None


class Decisions:
    """The last ones. The caller holds the storage's lock."""

    def __init__(
        self,
        directory: Directory | DeviceDirectory,
        draws: DrawCounts | None,
        exchange_rows: Callable[[Decision], None],
    ) -> None:
        """`exchange_rows`: swaps the rows of a decision with those in its slots."""
        self._directory, self._draws, self._exchange_rows = directory, draws, exchange_rows
        self._kept: deque[Decision] = deque(maxlen=_KEPT)
        self.undone = 0  # how many are undone, from the last one back
        self.begun = 0  # batches whose step has begun

    @property
    def last(self) -> Decision:
        return self._kept[-1]

    def add(self, decision: Decision) -> None:
        self._kept.append(decision)

    def undo_after(self, batches: int) -> None:
        """Goes back to the state after a number of batches."""
        while self._directory.batches > batches:
            self.undone += 1
            decision = self._kept[-self.undone]
            self._directory.undo(decision.changes)
            if self._draws is not None and decision.draws is not None:
                self._draws.take_back(decision.draws)
            self._exchange_rows(decision)

    def redo_until(self, batches: int) -> None:
        """Goes on to the state after a number of batches."""
        while self._directory.batches < batches:
            self._redo()

    def redo_all(self) -> None:
        while self.undone:
            self._redo()

    def _redo(self) -> None:
        decision = self._kept[-self.undone]
        self.undone -= 1
        self._directory.redo(decision.changes)
        if self._draws is not None and decision.draws is not None:
            self._draws.apply(decision.draws)
        self._exchange_rows(decision)

    def drop_undone(self) -> None:
        """Forgets what is undone: it will not be redone."""
        for _ in range(self.undone):
            self._kept.pop()
        self.undone = 0

    def clear(self) -> None:
        """Forgets all of it: the table was replaced, and no step is provisional."""
        self._kept.clear()
        self.undone, self.begun = 0, self._directory.batches
