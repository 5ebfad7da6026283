"""The gradients of rows that several parts of a batch read, kept until they are all there.

Autograd would make one gradient of the whole table for each reading and add them up. Here a reading
leaves its gradient as it is, one row per id, and a single pass sums them: by the order of the
parts, whatever the order in which the backward reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class RowGradients:
    """Of some parts [n_0], [n_1] ... of row numbers, each read once or more, or not at all."""

    def __init__(self, parts: Sequence[Tensor], like: Tensor) -> None:
        """`like`: a tensor [..., width] with the dtype and device of the gradients."""
        self._parts = list(parts)
        self._like = like
        self._values: list[Tensor | None] = [None] * len(parts)
        self._others: list[tuple[Tensor, Tensor | None]] = []
        # What a reading depends on for autograd: it gets no gradient itself.
        self.anchor = torch.empty(0, dtype=like.dtype, device=like.device, requires_grad=True)

    def add(self, part: int | None, rows: Tensor, gradient: Tensor) -> None:
        """gradient [..., width] of a reading of rows [...]: those of a part, or others."""
        flat = gradient.reshape(-1, gradient.shape[-1])
        if part is None:
            self._others.append((rows.reshape(-1), flat))
            return
        before = self._values[part]
        self._values[part] = flat if before is None else before + flat

    def move(self, parts: Sequence[Tensor], find: Callable[[Tensor], Tensor]) -> RowGradients:
        """The same gradients, of rows with other numbers: those of the parts, and of others by
        `find`."""
        moved = RowGradients(parts, self._like)
        moved._values = self._values
        moved._others = [(find(rows), value) for rows, value in self._others]
        return moved

    def take(self, *, only_read: bool = False) -> tuple[Tensor, Tensor]:
        """(rows [n], gradients [n, width]), part after part, the others last. A part that was not
        read has zeros, or is left out with `only_read`."""
        found = [
            (part.reshape(-1), value)
            for part, value in zip(self._parts, self._values, strict=True)
            if value is not None or not only_read
        ]
        found += self._others
        width = self._like.shape[-1]
        values = [
            value if value is not None else self._like.new_zeros(rows.numel(), width)
            for rows, value in found
        ]
        if len(found) == 1:
            return found[0][0], values[0]
        if not found:
            none = torch.zeros(0, dtype=torch.int64, device=self._like.device)
            return none, self._like.new_zeros(0, width)
        return torch.cat([rows for rows, _ in found]), torch.cat(values)
