"""Which ids of a dynamic table have a row, and where, on the device that holds the rows: in plain
torch, by sorting all ids. What embedding/dynamic/device_directory.py makes decisions of.

Ids are in virtual shards of `rows` entries each, a shard after the other: an entry is a row of the
table. A key is an id's hash with the sign flipped (embedding/dynamic/layout.py); its upper bits are
the shard. Whatever a batch changes is swapped with what was there before, so that the same call
takes it back.

On a device, lists whose length only the device knows have the length of the input, and anything
behind what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EMPTY = -1  # `last` of an entry that holds no id
MOST = 2**31 - 1  # a count stays there
_SIGN = -(1 << 63)
_FIRST, _SECOND = 0x319642B2D24D8EC3, 0x96DE1B173F119089 - (1 << 64)


@dataclass(frozen=True)
class IdMap:
    """The ids of some virtual shards."""

    shards: int
    rows: int  # of a shard
    first_shard: int
    bits: int  # of a hash, below its shard
    # Of an entry, side by side in 16 bytes: who finds its id has the others with it.
    ids: Tensor  # [shards * rows] int64, every second one of its memory
    last: Tensor  # [shards * rows] int32, batch of the last use; EMPTY: no id
    count: Tensor  # [shards * rows] int32, batches that used it
    words: Tensor  # [shards, buckets, 8] int32: where ids are found (triton/id_map.py), or nothing
    zeros: Any = None  # what else these kernels need

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.ids, self.last, self.count, self.words))


@dataclass(frozen=True)
class Uses:
    """The rows that a batch used, each once, and what is swapped with them."""

    entries: Tensor  # [n] int64; -1: none
    last: Tensor  # [n] int32
    count: Tensor  # [n] int32

    @property
    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())


@dataclass(frozen=True)
class Lookup:
    """A batch beside the map."""

    found: Tensor  # [n] int64: the entry of each key
    uses: Uses
    places: Tensor  # [n] int32, in any order: of the keys that have none
    number: Tensor  # [1]: how many these are


@dataclass(frozen=True)
class Contents(Uses):
    """Entries whose id changes, each once, and what is swapped with them."""

    ids: Tensor  # [n] int64


@dataclass(frozen=True)
class Missing:
    """Ids without a row, each once: by shard; ascending in each, once they are ordered."""

    ids: Tensor  # [n] int64; behind the last one: anything
    wanted: Tensor  # [shards] int32: how many
    starts: Tensor  # [shards] int64: where those of a shard begin
    counts: Tensor | None = None  # [n] int32: batches that they occurred in; None: this one


def allocate(shards: int, rows: int, first_shard: int, device: torch.device, bits: int) -> IdMap:
    """A map without ids."""
    entries = torch.zeros(shards * rows, 2, dtype=torch.int64, device=device)
    _, _, last, count = entries.view(torch.int32).unbind(1)
    last.fill_(EMPTY)
    words = torch.zeros(0, dtype=torch.int32, device=device)
    return IdMap(shards, rows, first_shard, bits, entries[:, 0], last, count, words)


def compute_ids(keys: Tensor) -> Tensor:
    """The ids [n] of keys [n]."""
    x = keys ^ _SIGN
    x = (x ^ _shift(x, 31) ^ _shift(x, 62)) * _FIRST
    x = (x ^ _shift(x, 27) ^ _shift(x, 54)) * _SECOND
    return x ^ _shift(x, 30) ^ _shift(x, 60)


def find(map: IdMap, keys: Tensor, absent: int = -1) -> Tensor:
    """Entries [n] of keys [n]; `absent` for those that have none."""
    used = (map.last != EMPTY).nonzero().view(-1)
    ids, order = map.ids[used].sort()
    wanted = compute_ids(keys)
    if not ids.numel():
        return torch.full_like(wanted, absent)
    place = torch.searchsorted(ids, wanted).clamp_(max=ids.numel() - 1)
    return torch.where(ids[place] == wanted, used[order[place]], absent)


def look_up(
    map: IdMap, keys: Tensor, counted: Tensor | None, batch: int, absent: int = -1
) -> Lookup:
    """Finds the keys [n] of a batch, which uses their entries; `absent`, no entry's number, for
    those that have none. An entry counts as used once if one of its keys is `counted` [n] uint8;
    None: all are."""
    found = find(map, keys)
    hit = found >= 0
    entries = torch.unique(found[hit])
    uses = Uses(entries, map.last[entries], map.count[entries])
    map.last[entries] = batch
    counts = entries if counted is None else torch.unique(found[hit & (counted != 0)])
    map.count[counts] = (map.count[counts].long() + 1).clamp(max=MOST).int()
    places = (~hit).nonzero().view(-1)
    found[places] = absent
    return Lookup(found, uses, places.int(), torch.tensor([places.numel()]).to(places.device))


def find_again(map: IdMap, keys: Tensor, lookup: Lookup, absent: int = -1) -> None:
    """Writes the entries of those keys [n] that had none: their ids may have got one."""
    places = lookup.places.long()
    lookup.found[places] = find(map, keys[places], absent)


def swap_uses(map: IdMap, uses: Uses) -> None:
    """Exchanges last uses and counts with those that are noted."""
    at = uses.entries.clamp(min=0)
    there = uses.entries >= 0
    for held, other in ((map.last, uses.last), (map.count, uses.count)):
        now = held[at]
        held[uses.entries[there]] = other[there]
        other.copy_(now)


def list_missing(map: IdMap, keys: Tensor, lookup: Lookup, counted: Tensor | None) -> Missing:
    """The ids of those keys [n] that have no entry, not ordered yet on a GPU. Of ids that are never
    `counted` none is listed."""
    places = lookup.places.long()
    if counted is not None:
        places = places[counted[places] != 0]
    keys = torch.unique(keys[places])
    ids = compute_ids(keys)
    shard = _shift(keys ^ _SIGN, map.bits) - map.first_shard
    order = ids.argsort()
    order = order[shard[order].argsort(stable=True)]
    wanted = torch.bincount(shard, minlength=map.shards)
    return Missing(ids[order], wanted.int(), wanted.cumsum(0) - wanted)


def order(map: IdMap, missing: Missing) -> Missing:
    """The same ids, ordered: for whoever reads them before `place`."""
    return missing


def count_room(map: IdMap, missing: Missing, *, limit: int, evicts: bool) -> Tensor:
    """[shards] int32: how many of the missing ids of each would be placed."""
    able = (map.last == EMPTY) | ((map.last < limit) & evicts)
    return torch.minimum(able.view(map.shards, map.rows).sum(1).int(), missing.wanted)


def place(
    map: IdMap,
    missing: Missing,
    *,
    batch: int,
    limit: int,
    by_count: bool,
    evicts: bool,
    told: Tensor | None = None,
) -> tuple[Contents, Tensor, Tensor]:
    """Where missing ids go, in their order: into the empty entries of their shard, the lowest
    first, then, if it `evicts`, into those whose last use was before `limit`, in the order of
    (last use, id), or of (count, last use, id). Changes nothing. Writes the
    sums to `told` [3], too, which may be pinned memory of the host.

    Returns:
        what to swap with the map, room for its ids once more, which is for `swap_contents`, and the
        sums over shards [3]: ids that get an entry, those whose entry held another id, missing ids.
    """
    empty, entries = map.last == EMPTY, torch.arange(map.last.numel(), device=map.last.device)
    able = ~empty & (map.last < limit) & evicts
    order = torch.where(empty, entries, map.ids).argsort()
    columns = [map.last, *([map.count] if by_count else [])]
    for column in [*(torch.where(empty, 0, each) for each in columns), (~empty).int()]:
        order = order[column[order].argsort(stable=True)]
    order = order[(empty | able)[order]]
    shard = order // map.rows
    order, shard = order[shard.argsort(stable=True)], shard.sort().values
    room = torch.bincount(shard, minlength=map.shards)
    number = torch.arange(order.numel(), device=order.device) - (room.cumsum(0) - room)[shard]
    taken = number < missing.wanted[shard]
    order, from_ = order[taken], (missing.starts[shard] + number)[taken]
    ones = torch.ones_like(order, dtype=torch.int32)
    counts = ones if missing.counts is None else missing.counts[from_]
    contents = Contents(order, ones * batch, counts, missing.ids[from_])
    sums = [len(order), int((~empty)[order].sum()), int(missing.wanted.sum())]
    summed = torch.tensor(sums, device=order.device)
    if told is not None:
        told.copy_(summed)
    return contents, torch.empty_like(contents.ids), summed


def swap_contents(
    map: IdMap, contents: Contents, total: Tensor | None = None, came: Tensor | None = None
) -> None:
    """Exchanges ids, last uses and counts with those that are noted; the first `total` [1] of
    them, if it is given. Writes the ids that come to `came` [n], if that is."""
    if came is not None:
        came.copy_(contents.ids)
    swap_uses(map, contents)
    there = contents.entries >= 0
    now = map.ids[contents.entries.clamp(min=0)]
    map.ids[contents.entries[there]] = contents.ids[there]
    contents.ids.copy_(now)


def note(entries: Tensor, last: Tensor, count: Tensor, ids: Tensor) -> Contents:
    """For `swap_contents`: all [n]."""
    return Contents(entries, last, count, ids)


def shorten(contents: Contents, n: int) -> Contents:
    """The first n of them."""
    return Contents(**{name: value[:n] for name, value in vars(contents).items()})


def rebuild(map: IdMap) -> None:
    """After ids and last uses were written."""


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's >> keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
