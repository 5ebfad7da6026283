"""Which rows have changed: marks that row updates set and that consumers (differential checkpoints,
for instance), each in its own time, take and clear.

A consumer has a bit of its own in the byte of each row. To mark a row is to set them all: one
store, by the kernel that updates the row where there is one, and nothing is read on the host.
Finding the marked rows waits for the device. Bits are cleared on the thread and stream that update
the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.native import address, load_native

_BITS = tuple(1 << number for number in range(8))


class ChangedRows:
    """Marks of `size` local rows, for each consumer."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self.device = size, device
        # [size + 1] uint8, if there is a consumer. The last one is that of row -1, which names
        # none: kernels fill up with it what they cannot count on the host.
        self.marks: Tensor | None = None
        self._bits: dict[str, int] = {}  # by consumer

    def follow(self, consumer: str) -> None:
        """From now on changes are marked for `consumer`; marks that it had are cleared."""
        if self.marks is None:
            self.marks = torch.zeros(self._size + 1, dtype=torch.uint8, device=self.device)
        if consumer not in self._bits:
            free = [bit for bit in _BITS if bit not in self._bits.values()]
            if not free:
                raise ValueError(
                    f"changes are marked for {len(_BITS)} consumers at most, and "
                    f"{', '.join(self._bits)} have them: {consumer} cannot"
                )
            self._bits[consumer] = free[0]
        self.marks.bitwise_and_(ALL - self._bits[consumer])

    def forget(self, consumer: str) -> None:
        """Marks nothing more for `consumer`."""
        self._bits.pop(consumer, None)
        if not self._bits:
            self.marks = None

    def is_followed(self, consumer: str) -> bool:
        return consumer in self._bits

    @property
    def consumers(self) -> list[str]:
        return list(self._bits)

    def get_marks(self, consumer: str) -> Tensor:
        """A copy of the marks [size] bool of a consumer."""
        return self._get_bytes()[: self._size].bitwise_and(self._bits[consumer]).ne(0)

    def set_marks(self, consumer: str, marks: Tensor) -> None:
        """Sets a consumer's marks [size] bool as they once were, and goes on marking for it."""
        self.follow(consumer)
        bits = marks.to(self.device, torch.uint8).mul_(self._bits[consumer])
        self._get_bytes()[: self._size].bitwise_or_(bits)

    def mark(self, rows: Tensor) -> None:
        """Marks local rows [n], in any order and as often as they come; a row of -1 is none."""
        if self.marks is not None:
            mark_rows(self.marks, rows.long())

    def mark_all(self) -> None:
        """Marks every row: something else than an update has written to them."""
        if self.marks is not None:
            self.marks.fill_(ALL)

    def find(self, consumer: str, part: slice) -> Tensor:
        """Marked rows [n] of a part, ascending, from its beginning. Waits for the device."""
        return find_marks(self._get_bytes()[: self._size][part], self._bits[consumer])

    def _get_bytes(self) -> Tensor:
        assert self.marks is not None, "nobody follows the changes of these rows"
        return self.marks


ALL = 255  # the bits of a changed row


def mark_rows(marks: Tensor, rows: Tensor) -> None:
    """Sets all bits of rows [n] int64 in marks [size] uint8; a row of -1 is the last one."""
    assert marks.is_contiguous() and marks.dtype == torch.uint8
    library = load_native() if marks.is_cpu else None
    if library is None:
        marks.index_fill_(0, rows, ALL)
        return
    rows = rows.contiguous()
    assert rows.dtype == torch.int64
    library.mark_rows(rows.numel(), address(rows), marks.numel(), address(marks))


def find_marks(marks: Tensor, bit: int) -> Tensor:
    """The rows [n] int64 with a bit set in marks [size], ascending."""
    assert marks.is_contiguous() and marks.dtype == torch.uint8
    library = load_native() if marks.is_cpu else None
    if library is None:
        return marks.bitwise_and(bit).nonzero().view(-1)
    size, at = marks.numel(), address(marks)
    found = torch.empty(library.count_marks(size, at, bit), dtype=torch.int64)
    library.find_marks(size, at, bit, address(found))
    return found
