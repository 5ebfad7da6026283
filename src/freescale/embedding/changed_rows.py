"""Which rows have changed: marks that row updates set and that consumers, each in its own time,
take and clear.

A consumer (differential checkpoints, for instance) has a set of marks of its own, so that one
that takes its marks leaves those of the others alone. Marking is one kernel on the stream of the
update and reads nothing on the host; finding the marked rows waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.dispatch import choose_marks


class ChangedRows:
    """Marks of `size` local rows, for each consumer."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self.device = size, device
        # [size + 1] bool by consumer. The last one is that of row -1, which names none: kernels
        # fill up with it what they cannot count on the host.
        self._marks: dict[str, Tensor] = {}

    def follow(self, consumer: str) -> None:
        """From now on changes are marked for `consumer`; marks that it had are cleared."""
        if consumer in self._marks:
            self._marks[consumer].zero_()
        else:
            self._marks[consumer] = torch.zeros(
                self._size + 1, dtype=torch.bool, device=self.device
            )

    def forget(self, consumer: str) -> None:
        """Marks nothing more for `consumer`."""
        self._marks.pop(consumer, None)

    def is_followed(self, consumer: str) -> bool:
        return consumer in self._marks

    @property
    def consumers(self) -> list[str]:
        return list(self._marks)

    def get_marks(self, consumer: str) -> Tensor:
        """A copy of the marks [size] of a consumer."""
        return self._marks[consumer][: self._size].clone()

    def set_marks(self, consumer: str, marks: Tensor) -> None:
        """Marks [size] of a consumer as they once were; from now on changes are marked for it."""
        self.follow(consumer)
        self._marks[consumer][: self._size].copy_(marks)

    def mark(self, rows: Tensor) -> None:
        """Marks local rows [n], in any order and as often as they come; a row of -1 is none."""
        if self._marks:
            choose_marks(self.device).mark_rows(list(self._marks.values()), rows.long())

    def mark_all(self) -> None:
        """Marks every row: something else than an update has written to them."""
        for marks in self._marks.values():
            marks.fill_(True)

    def find(self, consumer: str, part: slice) -> Tensor:
        """Marked rows [n] of a part, ascending and counted from its beginning. Waits for the
        device."""
        found: Tensor = choose_marks(self.device).find_marks(
            self._marks[consumer][: self._size][part]
        )
        return found
