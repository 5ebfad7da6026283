"""Python bindings of csrc/engine.h, and whether the engine is available."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from freescale.compiled import compile_and_load, declare

SOURCE = Path(__file__).with_name("csrc") / "engine.c"


class ErrorCode(IntEnum):
    """Why a channel of the engine failed: `ErrorCode` of engine.h."""

    NONE = 0
    CLOSED = 1
    TIMED_OUT = 2
    SIZE_MISMATCH = 3
    DEVICE = 4
    OUTSIDE_RING = 5


class Driver(ctypes.Structure):
    """Entry points of libcuda and a context: `Driver` of engine.h."""

    _fields_ = [
        (name, c_void_p)
        for name in ("copy", "record", "query", "create", "destroy", "use", "context")
    ]


class EngineLibrary:
    """The compiled engine. Functions that wait release Python's lock; the others are too short."""

    def __init__(self, path: str) -> None:
        holding, releasing = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.gate_new = declare(holding.gate_new, c_void_p, c_double)
        self.gate_free = declare(holding.gate_free, None, c_void_p)
        ring, inbox = (c_void_p, c_int, c_int64, c_int64), (c_void_p, c_int, c_int64)
        streams = (c_void_p, c_void_p)
        channel = (c_int, c_int, *ring, *inbox, c_void_p, c_double, POINTER(Driver), *streams)
        self.channel_new = declare(releasing.channel_new, c_void_p, *channel)
        self.channel_free = declare(releasing.channel_free, None, c_void_p)
        self.channel_stop = declare(holding.channel_stop, None, c_void_p)
        peer = (c_void_p, c_int, c_int, c_int, c_void_p)
        self.channel_set_peer = declare(holding.channel_set_peer, None, *peer)
        arrays = (POINTER(c_uint64), POINTER(c_int64)) * 2
        transfer = (c_void_p, c_int, c_int, c_void_p, c_int64, *arrays)
        self.channel_submit = declare(holding.channel_submit, c_int64, *transfer)
        self.channel_wait = declare(releasing.channel_wait, c_int, c_void_p, c_int64, c_double)
        self.channel_is_done = declare(holding.channel_is_done, c_int, c_void_p, c_int64)
        self.channel_bytes_left = declare(holding.channel_bytes_left, c_int64, c_void_p)
        error = (c_void_p, POINTER(c_int), POINTER(c_int64))
        self.channel_error = declare(holding.channel_error, c_int, *error)


@cache
def _load_once() -> tuple[EngineLibrary | None, str]:
    return compile_and_load(SOURCE, EngineLibrary)


def load_engine() -> EngineLibrary | None:
    """The engine, compiled at the first call; None if it is missing."""
    return None if _is_refused() else _load_once()[0]


def explain_missing_engine() -> str:
    """Why the engine is missing: it cannot be compiled, cached or loaded, or FREESCALE_ENGINE=0
    disables it on this machine. Empty if it is there."""
    return "FREESCALE_ENGINE=0" if _is_refused() else _load_once()[1]


def _is_refused() -> bool:
    return os.environ.get("FREESCALE_ENGINE", "1") == "0"
