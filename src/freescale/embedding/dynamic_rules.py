"""What a user says of a dynamic table: its room, which ids get a row, and which rows make room."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Virtual shards of a large table, whatever the number of ranks. A small one has fewer, so that each
# has SHARD_ROWS rows: hashing fills shards unevenly. If as many ids come as there are rows, a share
# of 0.4 / sqrt(rows of a shard) finds its shard full.
SHARDS = 4096
SHARD_ROWS = 128
ENTRY_BYTES = 24  # of memory for an id that has a row, or is counted; at most
# Id of the learned default row; no other id should be this number.
DEFAULT_ID = -5322254210574113211
PINNED = 3  # consecutive batches, from its last use on, for which a row stays

AUTO = "auto"
MAPS = ("host", "device")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGB]?)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """Admits an id once it has occurred in so many global `batches`; until then it reads zeros.
    `room`: ids that are counted at a time, over all ranks, for 23 bytes of host memory each; the
    one that was seen longest ago is forgotten for a new one. None: as many as the table's rows."""

    batches: int
    room: int | None = None

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise ValueError(f"Seen needs a number of batches from 1 on, not {self.batches}")
        if self.room is not None and self.room < 1:
            raise ValueError(f"room of Seen must be at least 1, not {self.room}")

    def __str__(self) -> str:
        return f"admits after {self.batches} batches" if self.batches > 1 else "admits every id"


@dataclass(frozen=True)
class After:
    """Removes rows that no step has used for a while; a row is never evicted for another one. Each
    step looks through one shard: a row goes more than `steps` steps after its last use, at the
    latest as many later as there are shards (4,096 from 520,193 rows on, else fewer)."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < PINNED:
            raise ValueError(f"After needs at least {PINNED} steps, not {self.steps}")

    def __str__(self) -> str:
        return f"removes rows unused for {self.steps:,} steps"


@dataclass(frozen=True)
class LFU:
    """Evicts the row that the fewest batches have used, and forgets old uses: all counts are halved
    at once, every `halved_every` batches, so that rows which were popular long ago make room. By
    integers alone, from a row's count and the batch that used it last; nothing is swept."""

    halved_every: int

    def __post_init__(self) -> None:
        if self.halved_every < 1:
            raise ValueError(
                f"LFU needs a number of batches from 1 on between two halvings, not "
                f"{self.halved_every}; evict='lfu' keeps counts for ever"
            )

    def __str__(self) -> str:
        return f"{_EVICTIONS['lfu']}, counts halved every {self.halved_every:,} batches"


LEARNED = "learned"
_DEFAULTS = ("zeros", LEARNED)
_EVICTIONS = {"lru": "evicts the row used longest ago", "lfu": "evicts the row used least often"}


@dataclass(frozen=True)
class Dynamic:
    """A table whose ids are any int64. A row is made when its id is admitted, a function of (seed,
    table, id) alone, and goes when another id needs its room. What is admitted and evicted depends
    on the global batches alone, never on the number of ranks or the schedule.

    Args:
        capacity: rows over all ranks, rounded up to a multiple of 4,096; also as text, "50M".
        admit: `Seen(n)`.
        evict: "lru" (last use, then id), "lfu" (number of batches, last use, id), the same with
            counts that are halved now and then, `LFU(halved_every)`, or `After(steps)`. A row
            stays for three batches from its last use on. An id that finds no row reads zeros and
            is counted as turned away.
        negatives: batch features whose ids neither count nor get a row, unless they occur in
            another feature of the batch, too. They read the rows that are there, or zeros.
        default: what ids read that have no row, because they wait for admission, were turned away
            or have never occurred: "zeros", which are not trained, or "learned", one row for all
            of them, an ordinary row of a reserved id that is there from the first batch on.
        draws: the batch feature that in-batch negatives are drawn from, "targets". How often its
            ids occur is summed up over the batches, and `Retrieval` subtracts the log of the
            probability that follows (log-q). None: nothing is counted for it.
        map: where it is kept which ids have a row, of tables whose rows are in the memory of a GPU:
            "device", which decides without moving ids to the host and back, "host", or "auto": on
            the device, if it supports these rules. The decisions are the same. All other tables
            have it in host memory, and ids that are counted before they are admitted are always
            there.

    Raises:
        ValueError: something of it has no such value.
    """

    capacity: int | str
    admit: Seen = Seen(1)
    evict: str | LFU | After = "lru"
    negatives: tuple[str, ...] = ("negatives",)
    draws: str | None = None
    default: str = "zeros"
    map: str = AUTO

    def __post_init__(self) -> None:
        if parse_count(self.capacity) < 1:
            raise ValueError(f"a dynamic table needs room for rows, not {self.capacity}")
        if not isinstance(self.admit, Seen):
            raise ValueError(f"admit is {self.admit!r}: give freescale.Seen(batches)")
        if self.default not in _DEFAULTS:
            raise ValueError(
                f"default is {self.default!r}: give {' or '.join(map(repr, _DEFAULTS))}"
            )
        if not isinstance(self.evict, LFU | After) and self.evict not in _EVICTIONS:
            raise ValueError(
                f"evict is {self.evict!r}: give 'lru', 'lfu', freescale.LFU(halved_every) or "
                "freescale.After(steps)"
            )
        if self.map not in (AUTO, *MAPS):
            raise ValueError(f"map is {self.map!r}: give 'auto', 'host' or 'device'")
        if self.map == "device" and not self._suits_device:
            raise ValueError(
                "map='device' does not halve counts and has no learned default row; take map='host'"
            )

    @property
    def _suits_device(self) -> bool:
        return not isinstance(self.evict, LFU) and self.default != LEARNED

    @property
    def maps_on_device(self) -> bool:
        """Whether the map is in the memory of a GPU, if the rows are."""
        return self.map == "device" or (self.map == AUTO and self._suits_device)

    @property
    def rows(self) -> int:
        return _round_up(parse_count(self.capacity))

    @property
    def shards(self) -> int:
        """Virtual shards: a power of two up to SHARDS, a function of the capacity alone."""
        return min(SHARDS, 1 << (self.rows // SHARD_ROWS).bit_length() - 1)

    @property
    def shard_bits(self) -> int:
        """Bits of a hash below its shard."""
        return 65 - self.shards.bit_length()

    @property
    def shard_rows(self) -> int:
        """Rows of each virtual shard."""
        return self.rows // self.shards

    @property
    def counters(self) -> int:
        """Ids that are counted before they are admitted; 0 if all are admitted at once."""
        if self.admit.batches == 1:
            return 0
        return self.rows if self.admit.room is None else _round_up(self.admit.room)

    @property
    def shard_counters(self) -> int:
        """The same of each virtual shard."""
        return self.counters // self.shards

    @property
    def map_bytes(self) -> int:
        """Bytes of the map from ids to rows, over all ranks."""
        return self.rows * ENTRY_BYTES

    @property
    def counter_bytes(self) -> int:
        """Of host memory, over all ranks: ids that are counted before they are admitted."""
        return self.counters * ENTRY_BYTES

    def describe(self) -> list[object]:
        """Plain JSON that tells tables apart which do not hold the same: for checkpoints."""
        further = {"draws": self.draws is not None, LEARNED: self.default == LEARNED}
        counters = self.counters // SHARDS  # whatever the number of shards: as it always was
        return ["dynamic", counters, *(name for name, there in further.items() if there)]

    def __str__(self) -> str:
        evict = _EVICTIONS[self.evict] if isinstance(self.evict, str) else str(self.evict)
        default = ", others read a learned row" if self.default == LEARNED else ""
        where = f", map on the {self.map}" if self.map != AUTO else ""
        return f"dynamic, {self.admit}, {evict}{default}{where}"


def _round_up(count: int) -> int:
    return -(-count // SHARDS) * SHARDS


def parse_count(count: int | str) -> int:
    """ "50M" -> 50,000,000. ValueError for what is no count."""
    found = _COUNT.fullmatch(str(count))
    if found is None:
        raise ValueError(f"{count!r} is not a number of rows: give for instance 50000000 or '50M'")
    return round(float(found[1]) * _UNITS[found[2].upper()])


def parse_dynamic(text: str) -> Dynamic | None:
    """`dynamic:50M`, with `:seen=3`, `:lru`, `:lfu`, `:lfu=10000`, `:after=1000`,
    `:default=learned` or `:map=host` behind it; None for anything else. ValueError for what cannot
    be read."""
    kind, _, rest = text.partition(":")
    if kind != "dynamic":
        return None
    capacity, *options = rest.split(":")
    if not capacity:
        raise ValueError("'dynamic' needs the number of its rows: dynamic:50M")
    admit, default, where = Seen(1), _DEFAULTS[0], AUTO
    chosen: str | LFU | After = "lru"
    for option in options:
        name, _, value = option.partition("=")
        if name in _EVICTIONS and not value:
            chosen = name
        elif name == "default" and value in _DEFAULTS:
            default = value
        elif name == "seen" and value.isdecimal():
            admit = Seen(int(value))
        elif name == "lfu" and value.isdecimal():
            chosen = LFU(int(value))
        elif name == "after" and value.isdecimal():
            chosen = After(int(value))
        elif name == "map" and value in (AUTO, *MAPS):
            where = value
        else:
            raise ValueError(
                f"{option!r} in {text!r} is not one of seen=N, lru, lfu, lfu=BATCHES, after=STEPS, "
                "default=learned, map=host and map=device"
            )
    return Dynamic(capacity, admit, chosen, default=default, map=where)
