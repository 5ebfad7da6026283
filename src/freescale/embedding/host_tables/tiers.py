"""Where rows of a sharded table are at home, if not on the device: `Host` and `Disk`, cached."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """ "8GB" -> 8,000,000,000; "8GiB" -> 8 * 2**30. ValueError for what is no size."""
    found = _SIZE.fullmatch(str(size))
    if found is None:
        raise ValueError(f"{size!r} is not a size: give bytes, or for instance '8GB' or '512MiB'")
    number, unit, binary = found.groups()
    factor = _UNITS[unit.upper()]
    return int(float(number) * (1024 ** list(_UNITS).index(unit.upper()) if binary else factor))


def format_bytes(count: float) -> str:
    """A size in words, as `parse_bytes` takes it: never less than `count`."""
    for unit in ("GB", "MB", "kB"):
        size = _UNITS[unit[0].upper()]
        if count >= size:
            return f"{-(-count * 10 // size) / 10:g} {unit}"
    return f"{count:g} B"


class _Cached:
    cache: int | str

    @property
    def cache_bytes(self) -> int:
        return parse_bytes(self.cache)


@dataclass(frozen=True)
class Host(_Cached):
    """A sharded table whose rows and row state are in the memory of the host; the rows that steps
    use are in a cache on the GPU. Training computes the same bits as with the table on the GPU.

    Args:
        cache: size of the cache on each rank, rows and their state, for instance "8GB". It must
            hold the rows of three consecutive batches.
        direct: the table's memory is pinned, and a kernel reads the rows that come, while the
            host's cores store those that leave. It takes multiprocessors from the model: for models
            that are bound by their tables.
    """

    cache: int | str
    direct: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.cache)

    def __str__(self) -> str:
        how = ", read by the GPU" if self.direct else ""
        return f"host memory, cache {format_bytes(self.cache_bytes)}{how}"


@dataclass(frozen=True)
class Disk(_Cached):
    """The same with the rows in a file, and the cache in the memory of the device that computes.

    The file is working memory: it has no name, nobody else can open or cut it, and it goes with the
    process. What lasts are checkpoints.

    Args:
        path: a folder on the disk, on every machine. It is made if it is not there.
        cache: as of `Host`.
    """

    path: str
    cache: int | str

    def __post_init__(self) -> None:
        parse_bytes(self.cache)
        if not self.path:
            raise ValueError("Disk needs the path of a folder")

    def __str__(self) -> str:
        return f"disk {self.path}, cache {format_bytes(self.cache_bytes)}"


Tier = Host | Disk


def parse_tier(text: str) -> Tier | None:
    """`host:8GB`, `host:8GB:direct` or `disk:FOLDER:8GB`; None for anything else. ValueError for a
    tier that is not complete."""
    kind, _, rest = text.partition(":")
    if kind == "host":
        if not rest:
            raise ValueError("'host' needs the size of its cache: host:8GB")
        cache, _, how = rest.partition(":")
        if how not in ("", "direct"):
            raise ValueError(
                f"{text!r}: after the size of the cache may come 'direct', not {how!r}"
            )
        return Host(cache, direct=how == "direct")
    if kind == "disk":
        path, _, cache = rest.rpartition(":")
        if not path:
            raise ValueError(f"{text!r} must name a folder and the size of the cache: disk:DIR:8GB")
        return Disk(path, cache)
    return None
