"""Rows of a dynamic table that the kernels of a GPU draw where they lie.

Most are inserted before the host knows how many ids have come: as many as came with the larger of
the last two batches, and some headroom. The device has work while the host waits for the number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.embedding.layout import TableSpec
from freescale.kernels.row_moves.triton import insert_drawn, insert_zeros
from freescale.random import derive, hash_name

_SPARE = 4  # headroom: 25 % above the larger of the last two batches
_ALIGNED = 32  # rows: the rest begins at an address for which kernels are compiled


class DrawnRows:
    """Insertions into a storage's rows and their state."""

    def __init__(self, spec: TableSpec, weight: Tensor, state: dict[str, Tensor]) -> None:
        self._spec, self._weight, self._state = spec, weight, state
        self._inserted = (0, 0)  # rows, by each of the last two batches
        # former contents of the slots, for rows that are inserted before their number is known
        self.early: dict[str, Tensor] = {}
        self.late = 0  # batches with which more rows came than were inserted early
        self.seed_with(0, 1.0)

    def seed_with(self, seed: int, std: float) -> None:
        """What rows are drawn from."""
        table_seed = derive(seed, hash_name(self._spec.name)).view(1)
        self._seed, self._std = table_seed.to(self._weight.device), std

    def begin(self, slots: Tensor, ids: Tensor, total: Tensor) -> None:
        """Inserts rows before the host knows how many there are, `total` [1]."""
        most = max(self._inserted)
        room = min(slots.numel(), most + most // _SPARE)
        room -= room % _ALIGNED
        self.early = self._insert(slots, ids, room, total) if room else {}

    def end(self, slots: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Inserts the rest. Returns what was in all slots [m], by part, maybe with more."""
        early, self.early = self.early, {}
        count = slots.numel()
        self._inserted = (self._inserted[-1], count)
        room = early["rows"].shape[0] if early else 0
        if early and room >= count:
            return early
        self.late += 1
        late = self._insert(slots[room:], ids[room:], count - room)
        if not early:
            return late
        return {name: torch.cat([early[name], value]) for name, value in late.items()}

    def _insert(
        self, slots: Tensor, ids: Tensor, room: int, total: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Draws the first `room` rows, and puts zeros into their state. Returns what was there."""
        kept, state = {}, dict(self._state)
        # A number of each row goes with it: a launch less for the host.
        narrow = next((name for name, value in state.items() if value.dim() == 1), "")
        kept["rows"], zeroed = insert_drawn(
            self._weight, slots, ids, self._seed, self._std,
            state=state.pop(narrow, None), room=room, total=total,
        )  # fmt: skip
        if zeroed is not None:
            kept[narrow] = zeroed
        for name, value in state.items():
            kept[name] = insert_zeros(value, slots, room, total)
        return kept
