"""Which ids of a dynamic table have a row on this rank, decided where the rows are: on a GPU.

The decisions are those of directory.py, to the id; the map is in the memory of the device
(kernels/id_map/triton.py). A batch is decided on in this order:

    1. every id of the batch is looked up; those that have a row use it, the others are listed
    2. `After` removes old rows of the shard whose turn it is
    3. these, each once, by shard and ascending, get empty rows or those of victims; with
       `Seen(n)`, n > 1, the host counts them before (`WaitingIds`)
    4. they are looked up again

All of it is work of the current stream. The host reads a few numbers: what the ledger reports, and
how many rows have to be drawn; with `Seen(n)` also the ids without a row. It waits for them in
`finish` alone: between `begin` and that it may do something else, or give the device more to do.
Work on the map is in the order of the calls, whichever threads and streams they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.embedding.dynamic.directory import (
    CHANGE,
    FIGURES,
    BatchClock,
    BatchFigures,
    Decided,
    ShardArrays,
    address,
    describe_rules,
    get_shard_tensors,
    load_dynamic,
)
from freescale.embedding.dynamic_rules import PINNED, After, Dynamic
from freescale.kernels.id_map import triton as kernels
from freescale.kernels.id_map.triton_memory import EMPTY, Missing, Noted
from freescale.kernels.upload import upload
from freescale.streams import InTurn

_SUMS = 3  # over shards, which kernels write to the host; behind them, how many rows were swept


@dataclass(frozen=True)
class Admitted:
    """What a batch has decided."""

    missing: Missing  # ids that get a row, on the device
    turned_away: int
    waiting: int
    forgotten: int
    log: NDArray[Any]  # array of CHANGE: each counter's other state, in the order of changes


class WaitingIds:
    """Ids of one rank's shards [first, last) that have no row yet and are counted (`Seen`), in host
    memory: only a batch's ids without a row travel there, and those that get a row travel back."""

    def __init__(self, rules: Dynamic, shards: tuple[int, int]) -> None:
        """ValueError without a C compiler."""
        self._library = load_dynamic()
        self._rules, self._shards = rules, shards
        count = shards[1] - shards[0]
        self.counters = ShardArrays(count, rules.shard_counters, rules.shard_bits)

    def count(self, missing: Missing, room: Tensor, batch: int) -> Admitted:
        """Counts missing ids, and admits them while there is `room` [shards]. Waits for the GPU."""
        wanted, free = torch.stack([missing.wanted, room]).cpu().numpy()
        total, device = int(wanted.sum()), room.device
        ids = missing.ids[:total].cpu().numpy()
        admitted, counts = np.empty(total, np.int64), np.empty(total, np.int32)
        given, figures = np.zeros_like(wanted), np.zeros(len(FIGURES), np.int64)
        log = np.empty(2 * total, CHANGE)
        rules = describe_rules(self._rules, self._shards, batch)
        arrays = wanted, free, ids, log, admitted, counts, given, figures
        if self._library.count_missing(self.counters.struct, rules, *map(address, arrays)):
            raise MemoryError(f"counts of {total:,} ids need more memory than there is")
        found = dict(zip(FIGURES, figures.tolist(), strict=True))
        starts = np.cumsum(given, dtype=np.int64) - given
        return Admitted(
            Missing(
                upload(admitted[: found["inserted"]], device),
                upload(given, device),
                upload(starts, device),
                upload(counts[: found["inserted"]], device),
            ),
            found["turned_away"],
            found["waiting"],
            found["forgotten"],
            log[: found["changes"]].copy(),
        )

    def exchange(self, admitted: Admitted, back: bool) -> None:
        """To the state before the batch (back), or after it."""
        log = admitted.log
        self._library.exchange(None, self.counters.struct, log.size, address(log), back)

    def rebuild(self) -> None:
        """After counters were written."""
        self._library.rebuild(self.counters.struct)


@dataclass(frozen=True)
class DeviceChanges:
    """What a batch has changed: the other state of each entry."""

    uses: Noted
    swept: Noted | None
    new: Noted  # some of them were swept before
    rows: int  # that hold an id: more than before
    admitted: Admitted | None  # of tables that count ids before

    @property
    def tensors(self) -> list[Tensor]:
        parts = [self.uses, self.new, *([self.swept] if self.swept is not None else [])]
        return [tensor for part in parts for tensor in part.tensors]


@dataclass(frozen=True)
class Deciding:
    """What the device decides about a batch, before the host knows how much it is."""

    entries: Tensor  # [n] of the keys
    uses: Noted
    swept: Noted | None
    placed: Noted  # entries that ids get, and behind them anything
    new_ids: Tensor  # these ids
    total: Tensor  # [1] or more: how many they are
    admitted: Admitted | None


class DeviceDirectory(BatchClock):
    """The ids of one rank's shards. An entry's number is its row's, among this rank's."""

    def __init__(
        self, rules: Dynamic, first_shard: int, last_shard: int, device: torch.device
    ) -> None:
        """For the shards [first, last)."""
        self._rules, self._shards, self._device = rules, (first_shard, last_shard), device
        self._kernels = kernels
        count = last_shard - first_shard
        self.map = self._kernels.allocate(
            count, rules.shard_rows, first_shard, device, rules.shard_bits
        )
        shards = first_shard, last_shard
        self._waiting = WaitingIds(rules, shards) if rules.shard_counters else None
        super().__init__(count)
        # Written by kernels: a copy would be between two of them, and as long as one.
        pinned = torch.empty(_SUMS + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sums, self._swept, self._numbers = pinned[:_SUMS], pinned[_SUMS:], pinned.numpy()
        self.used = 0  # entries that hold an id
        self._in_turn = InTurn(device)  # on the map

    def decide(self, keys: Tensor, counted: Tensor | None = None, absent: int = -1) -> Decided:
        """Decides for the next batch: `begin` and `finish`."""
        return self.finish(self.begin(keys, counted, absent))

    def begin(self, keys: Tensor, counted: Tensor | None = None, absent: int = -1) -> Deciding:
        """The device decides for the next batch. `finish` has to follow before the next call. keys
        [n] of its ids on this rank (layout.py), in any order and as often as they occur. counted
        [n] uint8: 0 for negatives, which use a row that is there, and change nothing else.
        `absent`: the entry of ids that have none."""
        evict, batch, kernels = self._rules.evict, self.batches, self._kernels
        keys, counted = keys.contiguous(), None if counted is None else counted.contiguous()
        bounds = {"limit": batch - PINNED + 1, "evicts": not isinstance(evict, After)}
        with self._in_turn():
            looked = kernels.look_up(self.map, keys, counted, batch, absent)
            swept = self._sweep(batch)
            missing, admitted = kernels.list_missing(self.map, keys, looked, counted), None
            if self._waiting is not None:
                missing = kernels.order(self.map, missing)
                room = kernels.count_room(self.map, missing, **bounds)
                admitted = self._waiting.count(missing, room, batch)
                missing = admitted.missing
            placed, came, sums = kernels.place(
                self.map,
                missing,
                batch=batch,
                by_count=evict == "lfu",
                host_sums=self._sums,
                **bounds,
            )
            kernels.swap_contents(self.map, placed, sums, came)
            kernels.find_again(self.map, keys, looked, absent)
        return Deciding(looked.found, looked.uses, swept, placed, came, sums, admitted)

    def finish(self, deciding: Deciding) -> Decided:
        """Waits for the numbers of what was begun."""
        swept, admitted = deciding.swept, deciding.admitted
        self._in_turn.wait()
        inserted, evicted, wanted, gone = self._numbers.tolist()
        gone = gone if swept is not None else 0
        self.batches += 1
        new = self._kernels.shorten(deciding.placed, inserted)
        rows = inserted - evicted - gone
        self.used += rows
        figures = BatchFigures(inserted, evicted, gone, wanted - inserted, 0, 0)
        if admitted is not None:
            figures = replace(
                figures,
                turned_away=admitted.turned_away,
                waiting=admitted.waiting,
                forgotten=admitted.forgotten,
            )
        return Decided(
            entries=deciding.entries,
            inverse=None,
            new=new.entries,
            inserted=None,
            new_ids=deciding.new_ids,
            removed=swept.entries if swept is not None and gone else None,
            figures=figures,
            changes=DeviceChanges(deciding.uses, swept if gone else None, new, rows, admitted),
        )

    def _sweep(self, batch: int) -> Noted | None:
        """What was there before, in the shard whose turn it is. Tells the host how many went."""
        evict, (first, last), rows = self._rules.evict, self._shards, self.map.rows
        turn = batch % self._rules.shards
        if not isinstance(evict, After) or not first <= turn < last:
            return None
        begin = (turn - first) * rows
        held = self.map.last[begin : begin + rows]
        goes = (held != EMPTY) & (held < batch - evict.steps)
        entries = torch.arange(begin, begin + rows, device=self._device)
        nothing = torch.zeros_like(held)
        swept: Noted = self._kernels.note(
            torch.where(goes, entries, -1), nothing + EMPTY, nothing, torch.zeros_like(entries)
        )
        self._kernels.swap_contents(self.map, swept)
        self._swept.copy_(goes.sum().view(1), non_blocking=True)
        return swept

    def find(self, keys: Tensor, absent: int = -1) -> Tensor:
        """Entries [n] of keys [n]; `absent` for those without a row. Changes nothing."""
        with self._in_turn():
            return self._kernels.find(self.map, keys.contiguous(), absent)

    def read(self, keys: Tensor, weight: Tensor, dtype: torch.dtype, absent: int) -> Tensor:
        """Rows [n, width], of weight [m, width] on a GPU, of keys [n]; row `absent` for those
        without one. In one pass; changes nothing."""
        with self._in_turn():
            return self._kernels.read_rows(self.map, keys.contiguous(), weight, absent, dtype)

    def undo(self, changes: DeviceChanges) -> None:
        """Back to the state before the last batch that is not undone."""
        with self._in_turn(*changes.tensors):
            self._kernels.swap_contents(self.map, changes.new)
            if changes.swept is not None:
                self._kernels.swap_contents(self.map, changes.swept)
            self._kernels.swap_uses(self.map, changes.uses)
        if self._waiting is not None and changes.admitted is not None:
            self._waiting.exchange(changes.admitted, back=True)
        self.batches -= 1
        self.used -= changes.rows

    def redo(self, changes: DeviceChanges) -> None:
        """To the state after a batch that was undone."""
        with self._in_turn(*changes.tensors):
            self._kernels.swap_uses(self.map, changes.uses)
            if changes.swept is not None:
                self._kernels.swap_contents(self.map, changes.swept)
            self._kernels.swap_contents(self.map, changes.new)
        if self._waiting is not None and changes.admitted is not None:
            self._waiting.exchange(changes.admitted, back=False)
        self.batches += 1
        self.used += changes.rows

    def rebuild(self) -> None:
        """After ids, last uses and counts were written. Waits for the device."""
        with self._in_turn():
            self._kernels.rebuild(self.map)
            self.used = int((self.map.last != EMPTY).sum())
        if self._waiting is not None:
            self._waiting.rebuild()

    def get_tensors(self) -> dict[str, Tensor]:
        """By entry. Whoever writes to them calls `rebuild`."""
        return {"ids": self.map.ids, "last_use": self.map.last, "count": self.map.count}

    def get_shard_tensors(self) -> dict[str, Tensor]:
        """What shards hold besides entries, [shards, ...]: batches, counts of waiting ids."""
        counters = None if self._waiting is None else self._waiting.counters
        return get_shard_tensors(self.clock, self._shards, counters)

    def end_reading(self) -> None:
        """What was read of `get_tensors` on the current stream is before the next work."""
        with self._in_turn():
            pass
