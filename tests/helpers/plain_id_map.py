"""The map from ids to rows of a dynamic table in plain torch, by sorting all ids: what the kernels
of `kernels/id_map/triton.py` are compared with. A batch swaps its changes with the previous
contents: the same call undoes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.kernels.id_map.triton_memory import EMPTY, IdMap, Missing, Zeros

MOST = 2**31 - 1  # counts saturate here
_SIGN = -(1 << 63)
_FIRST, _SECOND = 0x319642B2D24D8EC3, 0x96DE1B173F119089 - (1 << 64)


@dataclass(frozen=True)
class Uses:
    """The rows that a batch used, each once, and the values to swap with them."""

    entries: Tensor  # [n] int64; -1: none
    last: Tensor  # [n] int32
    count: Tensor  # [n] int32

    @property
    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())


@dataclass(frozen=True)
class Lookup:
    """The keys of a batch in the map."""

    found: Tensor  # [n] int64: the entry of each key
    uses: Uses
    places: Tensor  # [n] int32, in any order: the keys without an entry
    number: Tensor  # [1]: how many keys have none


@dataclass(frozen=True)
class Contents(Uses):
    """Entries whose id changes, each once, and the values to swap with them."""

    ids: Tensor  # [n] int64


def allocate(shards: int, rows: int, first_shard: int, device: torch.device, bits: int) -> IdMap:
    """Creates a map without ids."""
    entries = torch.zeros(shards * rows, 2, dtype=torch.int64, device=device)
    _, _, last, count = entries.view(torch.int32).unbind(1)
    last.fill_(EMPTY)
    words = torch.zeros(0, dtype=torch.int32, device=device)
    ids, zeros = entries[:, 0], Zeros(device)
    return IdMap(shards, rows, first_shard, bits, ids, last, count, words, zeros)


def compute_ids(keys: Tensor) -> Tensor:
    """The ids [n] of keys [n]."""
    x = keys ^ _SIGN
    x = (x ^ _shift(x, 31) ^ _shift(x, 62)) * _FIRST
    x = (x ^ _shift(x, 27) ^ _shift(x, 54)) * _SECOND
    return x ^ _shift(x, 30) ^ _shift(x, 60)


def find(map: IdMap, keys: Tensor, absent: int = -1) -> Tensor:
    """Finds the entries [n] of keys [n]; `absent` for keys without one."""
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
    """Finds the entries of a batch's keys [n], and marks them as used; `absent`, which is no
    entry's number, for keys without one. A batch counts as one use of an entry if one of the
    entry's keys is `counted` [n] uint8; None: all are."""
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
    """Looks up the keys [n] that had no entry again: their ids may have one now."""
    places = lookup.places.long()
    lookup.found[places] = find(map, keys[places], absent)


def swap_uses(map: IdMap, uses: Uses) -> None:
    """Exchanges the last uses and counts of the map with those in `uses`."""
    at = uses.entries.clamp(min=0)
    there = uses.entries >= 0
    for held, other in ((map.last, uses.last), (map.count, uses.count)):
        now = held[at]
        held[uses.entries[there]] = other[there]
        other.copy_(now)


def list_missing(map: IdMap, keys: Tensor, lookup: Lookup, counted: Tensor | None) -> Missing:
    """Lists counted ids of keys [n] without an entry, on a GPU in any order."""
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
    """The same ids in order, for readers before `place`."""
    return missing


def count_room(map: IdMap, missing: Missing, *, limit: int, evicts: bool) -> Tensor:
    """[shards] int32: how many missing ids of each shard `place` would place."""
    able = (map.last == EMPTY) | ((map.last < limit) & evicts)
    return torch.minimum(able.view(map.shards, map.rows).sum(1).int(), missing.wanted)


def place(
    map: IdMap, missing: Missing, *, batch: int, limit: int, by_count: bool, evicts: bool,
    host_sums: Tensor | None = None,
) -> tuple[Contents, Tensor, Tensor]:  # fmt: skip
    """Decides where missing ids go, and changes nothing. In their order they get the empty entries
    of their shard, the lowest first. If the shard `evicts`, the next ones get the entries with a
    last use before `limit`, in order of (last use, id), or of (count, last use, id).

    Returns the contents to swap with the map, memory for as many ids, which `swap_contents` may
    use, and sums over shards [3]: ids that get an entry, evicted ids, missing ids. `host_sums`,
    maybe pinned, receives these too.
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
    if host_sums is not None:
        host_sums.copy_(summed)
    return contents, torch.empty_like(contents.ids), summed


def swap_contents(
    map: IdMap, contents: Contents, total: Tensor | None = None, came: Tensor | None = None
) -> None:
    """Exchanges ids, last uses and counts of the map with `contents`: all, or only the first
    `total` [1] if that is given. Writes the new ids of the map to `came` [n] if that is given."""
    if came is not None:
        came.copy_(contents.ids)
    swap_uses(map, contents)
    there = contents.entries >= 0
    now = map.ids[contents.entries.clamp(min=0)]
    map.ids[contents.entries[there]] = contents.ids[there]
    contents.ids.copy_(now)


def note(entries: Tensor, last: Tensor, count: Tensor, ids: Tensor) -> Contents:
    """The argument of `swap_contents`, from columns [n]."""
    return Contents(entries, last, count, ids)


def shorten(contents: Contents, n: int) -> Contents:
    """The first n entries."""
    return Contents(**{name: value[:n] for name, value in vars(contents).items()})


def rebuild(map: IdMap) -> None:
    """Makes the map consistent after its ids and last uses were overwritten."""


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's >> keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
