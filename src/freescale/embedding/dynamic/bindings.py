"""The functions of csrc/, as Python calls them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.compiled import compile_and_load, declare

SOURCE = Path(__file__).with_name("csrc") / "dynamic.c"

# `Change` of dynamic.c
CHANGE = np.dtype(
    [("table", "<i8"), ("entry", "<i8"), ("id", "<i8"), ("last", "<i4"), ("count", "<i4")]
)
FIGURES = ("inserted", "evicted", "swept", "turned_away", "waiting", "forgotten", "changes")
EVICT = {"lru": 0, "lfu": 1, "after": 2}  # `Evict` of dynamic.c


class ShardsStruct(Structure):
    """`Shards` of shards.h."""

    _fields_ = [
        *((name, c_int64) for name in ("shards", "rows", "buckets", "ahead", "bits")),
        *((name, c_void_p) for name in ("ids", "last", "count", "map", "used", "low")),
        *((name, c_void_p) for name in ("queue", "queue_at", "queue_end", "bound")),
    ]


class RulesStruct(Structure):
    """`Rules` of dynamic.c."""

    _fields_ = [
        (name, c_int64)
        for name in ("first_shard", "batch", "admit", "evict", "after", "swept", "pinned", "halved")
    ]


class DynamicLibrary:
    """The compiled functions. A call releases Python's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        shards, rules, at = POINTER(ShardsStruct), POINTER(RulesStruct), c_void_p
        plan = (c_int, shards, shards, rules, c_int64, *[at] * 7)
        self.plan_batch = declare(library.plan_batch, *plan)
        self.count_missing = declare(library.count_missing, c_int, shards, rules, *[at] * 8)
        self.find_batch = declare(library.find_batch, None, shards, c_int64, c_int64, at, at)
        self.exchange = declare(library.exchange, None, shards, shards, c_int64, at, c_int)
        self.rebuild = declare(library.rebuild, None, shards)


@cache
def _load_once() -> tuple[DynamicLibrary | None, str]:
    return compile_and_load(SOURCE, DynamicLibrary)


def load_dynamic() -> DynamicLibrary:
    """Compiled at the first call. ValueError where it cannot be."""
    library, reason = _load_once()
    if library is None:
        raise ValueError(f"dynamic tables need a C compiler: {reason}")
    return library


def address(array: NDArray[Any]) -> int:
    """Of the first element. Whoever calls holds the array until C has returned."""
    return array.ctypes.data
