"""The gradients of rows that several parts of a batch read, kept until they are all there.

Autograd would make one gradient of the whole table for each reading and add them up. Here a reading
leaves its gradient as it is, one row per id, and a single pass sums them: by the order of the
parts, whatever the order in which the backward reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RowGradients:
    """Of some parts [n_0], [n_1] ... of row numbers, each read once or more, or not at all."""

    def __init__(self, parts: Sequence[Tensor], like: Tensor) -> None:
        """`like`: a tensor [..., width] with the dtype and device of the gradients."""
        self._parts = list(parts)
        self._like = like
        self._values: list[Tensor | None] = [None] * len(parts)
        self._others: list[tuple[Tensor, Tensor]] = []
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

    @property
    def has_others(self) -> bool:
        """Whether rows were read that are none of the parts."""
        return bool(self._others)

    def take(self) -> Tensor:
        """[sum(n), width]: the gradients, part after part, the others last. They are kept no
        more."""
        width = self._like.shape[-1]
        values = [
            value if value is not None else self._like.new_zeros(part.numel(), width)
            for value, part in zip(self._values, self._parts, strict=True)
        ]
        values += [gradient for _, gradient in self._others]
        self._values = [None] * len(self._parts)
        if len(values) == 1:
            return values[0]
        return torch.cat(values) if values else self._like.new_zeros(0, width)

    def list_rows(self) -> Tensor:
        """[sum(n)]: the row numbers of what `take` returns."""
        rows = [part.reshape(-1) for part in self._parts] + [rows for rows, _ in self._others]
        return torch.cat(rows) if rows else self._like.new_zeros(0, dtype=torch.int64)
