"""Urgent overtakes bulk: between two pieces, bulk traffic of this rank gives way to what is urgent.
csrc/gate.h does the same for channels of the engine."""

from __future__ import annotations

import threading
import time


class Gate:
    def __init__(self, patience: float) -> None:
        """`patience`, in seconds: urgent traffic that does not move for so long waits for a slow
        rank, not for the network."""
        self.patience = patience
        self._condition = threading.Condition()
        self._urgent = 0  # transfers under way
        self._moved = 0.0  # when the last of their pieces did

    def begin(self) -> None:
        """An urgent transfer begins to move; `end` follows once."""
        with self._condition:
            self._urgent += 1
            self._moved = time.monotonic()

    def note_movement(self) -> None:
        self._moved = time.monotonic()

    def end(self) -> None:
        with self._condition:
            self._urgent -= 1
            self._condition.notify_all()

    def is_open(self) -> bool:
        """Whether bulk need not give way now."""
        return not self._urgent or self._moved + self.patience <= time.monotonic()

    def give_way(self) -> None:
        """Waits until the gate is open. Never for good: an urgent transfer may itself wait for a
        rank that waits for this bulk."""
        if not self._urgent:
            return
        with self._condition:
            while self._urgent and (left := self._moved + self.patience - time.monotonic()) > 0:
                self._condition.wait(left)
