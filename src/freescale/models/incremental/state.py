"""The state of one user's history."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.batch import Jagged, SequenceBatch
from freescale.models.hstu import HSTU
from freescale.models.sasrec import SASRec

FIRST_CAPACITY = 64  # events


class HistoryState:
    """What an encoder has computed of one user's history: the keys and values of every layer and
    the last output.

    It equals computing `events` anew while the weights stay. Memory doubles as the history grows,
    up to the model's `max_length`. With semi-local attention, keys and values that no later event
    sees are dropped: there are at most twice as many as an event sees. The events all stay, for
    when the history is computed anew.

    Attributes:
        length: number of events.
        rebuilds: how often the oldest quarter was dropped.
        skipped: events after the first visible ones without keys and values.
    """

    def __init__(
        self,
        encoder: HSTU | SASRec,
        columns: dict[str, Tensor],  # each [0, ...]
        users: Tensor | None,  # [1, places]: codes of the user's features
        prefix: int,  # tokens before the history
    ) -> None:
        self.length = self.rebuilds = self.capacity = self.skipped = self._room = 0
        self.visible = encoder.visible
        self.limit, self.prefix, self.users = encoder.max_length, prefix, users
        self.columns = dict(columns)  # each [capacity, ...]
        shape = len(encoder.layers), encoder.heads, prefix
        # [layers, heads, prefix + slots, d_qk or d_v]: events in order, but for skipped ones;
        # HSTU's are scaled: keys by d_qk**-0.5, values by 1 / max_length
        self.keys, self.values = (
            encoder.position.new_empty(*shape, width) for width in _get_widths(encoder)
        )
        self.output = encoder.position.new_zeros(encoder.width)  # the last event's

    @property
    def events(self) -> SequenceBatch:
        """The events that it stands for, and the user's features: a batch of one sample."""
        users = {} if self.users is None else {"user_features": self.users}
        lengths = torch.tensor([self.length], device=self.output.device)
        parts = {n: Jagged(values[: self.length], lengths) for n, values in self.columns.items()}
        return SequenceBatch(parts, dense=users)

    @property
    def nbytes(self) -> int:
        """Memory, with what is reserved for further events."""
        users = [] if self.users is None else [self.users]
        parts = [self.keys, self.values, self.output, *self.columns.values(), *users]
        return sum(part.nbytes for part in parts)

    @property
    def used(self) -> int:
        """Slots of keys and values in use: those of the prefix, and of events."""
        return self.prefix + self.length - self.skipped

    def find_events(self, stop: int, device: torch.device) -> Tensor:
        """[stop]: the event of each of the first slots, below 0 for those of the prefix."""
        slots = torch.arange(stop, device=device) - self.prefix
        if self.visible is None:
            return slots
        return torch.where(slots < self.visible.first, slots, slots + self.skipped)

    def select_latest(self, columns: dict[str, Tensor], count: int) -> dict[str, Tensor]:
        """The latest three quarters of `max_length` of its events and `count` new ones: what is
        left when there is no room for the new ones."""
        keep = self.limit - self.limit // 4
        first = max(0, self.length - max(0, keep - count))
        return {
            name: torch.cat([self.columns[name][first : self.length], values[-keep:]])
            for name, values in columns.items()
        }

    def clear(self) -> None:
        """Forgets all events. The prefix and the memory stay."""
        self.length, self.rebuilds, self.skipped = 0, self.rebuilds + 1, 0
        self.output = torch.zeros_like(self.output)

    def write(self, columns: dict[str, Tensor], count: int) -> None:
        """Writes `count` events behind the others. They count when they are computed."""
        self.reserve(count)
        for name, values in columns.items():
            self.columns[name][self.length : self.length + count] = values

    def reserve(self, count: int) -> None:
        """Makes room for `count` events behind the others."""
        stop = self.length + count
        if stop > self.capacity:
            capacity = min(self.limit, max(stop, 2 * self.capacity, FIRST_CAPACITY))
            for name, old in self.columns.items():
                rows = old.new_empty(capacity, *old.shape[1:])
                rows[: self.length] = old[: self.length]
                self.columns[name] = rows
            self.capacity = capacity
        if self.used + count > self.prefix + self._room:
            self._grow(count)

    def trim(self) -> None:
        """Drops keys and values that no later event sees, if they are many."""
        if self.visible is not None and self.used - self.prefix > self._most_slots():
            self._grow(0)

    def _most_slots(self) -> int:
        assert self.visible is not None
        return 2 * (self.visible.first + self.visible.last)

    def _grow(self, count: int) -> None:
        """Makes slots for so many events more, and drops those that no later event sees."""
        room, skip, first = self.capacity, 0, self.prefix
        if self.visible is not None:
            first += self.visible.first
            # the next event sees itself and last - 1 before it
            skip = max(0, self.used - first - self.visible.last + 1)
            room = min(room, max(self.used - skip - self.prefix + count, self._most_slots()))
        self.keys, self.values = (
            self._copy_slots(old, room, min(first, self.used), skip)
            for old in (self.keys, self.values)
        )
        self.skipped, self._room = self.skipped + skip, room

    def _copy_slots(self, old: Tensor, room: int, first: int, skip: int) -> Tensor:
        slots = old.new_empty(*old.shape[:2], self.prefix + room, old.shape[3])
        slots[:, :, :first] = old[:, :, :first]
        slots[:, :, first : self.used - skip] = old[:, :, first + skip : self.used]
        return slots


def _get_widths(encoder: HSTU | SASRec) -> tuple[int, int]:
    """Widths of a key and of a value."""
    if isinstance(encoder, HSTU):
        return encoder.widths
    return (encoder.width // encoder.heads,) * 2
