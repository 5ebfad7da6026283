"""The gradients of rows that several parts of a batch read, collected until they are complete.

Autograd would create a gradient of the whole table for each read. Here a read leaves one row per
id, and a single pass sums them in the order of the parts, however the backward reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class RowGradients:
    """Gradients of parts [n_0], [n_1] ... of row numbers, each read any number of times."""

    def __init__(self, parts: Sequence[Tensor], like: Tensor) -> None:
        """`like`: a tensor [..., width] with the dtype and device of the sums."""
        self._parts = list(parts)
        self._like = like
        self._values: list[Tensor | None] = [None] * len(parts)
        self._others: list[tuple[Tensor, Tensor | None]] = []
        # A read depends on it for autograd; it gets no gradient itself.
        self.anchor = torch.empty(0, dtype=like.dtype, device=like.device, requires_grad=True)

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def add(self, part: int | None, rows: Tensor, gradient: Tensor) -> None:
        """Adds the gradient [..., width] of a read of rows [...]: of a part, or of other rows. Two
        that are narrower than the sums are not added up here, which would round them."""
        flat = gradient.reshape(-1, gradient.shape[-1])
        before = None if part is None else self._values[part]
        if part is None or (before is not None and flat.dtype != self.dtype):
            self._others.append((rows.reshape(-1), flat))
        else:
            self._values[part] = flat if before is None else before + flat

    def move(self, parts: Sequence[Tensor], find: Callable[[Tensor], Tensor]) -> RowGradients:
        """The same gradients for the rows of new parts, and find(rows) for those of no part."""
        moved = RowGradients(parts, self._like)
        moved._values = self._values
        moved._others = [(find(rows), value) for rows, value in self._others]
        return moved

    def take(self, *, only_read: bool = False) -> tuple[Tensor, Tensor]:
        """(rows [n], gradients [n, width]), part after part, rows of no part last. A part without
        a read has zeros, or is left out with `only_read`."""
        found = [
            (part.reshape(-1), value)
            for part, value in zip(self._parts, self._values, strict=True)
            if value is not None or not only_read
        ]
        found += self._others
        width, dtypes = self._like.shape[-1], {each.dtype for _, each in found if each is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.dtype
        values = [
            self._like.new_zeros(rows.numel(), width, dtype=dtype) if value is None else value
            for rows, value in found
        ]
        if len(found) == 1:
            return found[0][0], values[0]
        if not found:
            none = torch.zeros(0, dtype=torch.int64, device=self._like.device)
            return none, self._like.new_zeros(0, width)
        return torch.cat([rows for rows, _ in found]), torch.cat(values)
