"""The functions of engine.c, as Python calls them; and whether this process has them."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache

from freescale.transport.hostwire.compiled import loaded


class Driver(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in ("copy", "record", "query", "create", "destroy", "use", "context")
    ]


class Calls:
    """The functions of engine.c. Those that wait let other threads run; the others are over before
    that would pay."""

    def __init__(self, path: str) -> None:
        quick, waiting = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.gate_new = _typed(quick.gate_new, c_void_p, c_double)
        self.gate_free = _typed(quick.gate_free, None, c_void_p)
        ring, inbox = (c_void_p, c_int, c_int64, c_int64), (c_void_p, c_int, c_int64)
        channel = (
            c_int,
            c_int,
            *ring,
            *inbox,
            c_void_p,
            c_double,
            POINTER(Driver),
            c_void_p,
            c_void_p,
        )
        self.channel_new = _typed(waiting.channel_new, c_void_p, *channel)
        self.channel_free = _typed(waiting.channel_free, None, c_void_p)
        self.stop = _typed(quick.channel_stop, None, c_void_p)
        self.peer = _typed(quick.channel_peer, None, c_void_p, c_int, c_int, c_int, c_void_p)
        arrays = (POINTER(c_uint64), POINTER(c_int64)) * 2
        self.submit = _typed(
            quick.channel_submit, c_int64, c_void_p, c_int, c_int, c_void_p, c_int64, *arrays
        )
        self.until = _typed(waiting.channel_until, c_int, c_void_p, c_int64, c_double)
        self.done = _typed(quick.channel_done, c_int, c_void_p, c_int64)
        self.left = _typed(quick.channel_left, c_int64, c_void_p)
        self.error = _typed(quick.channel_error, c_int, c_void_p, POINTER(c_int), POINTER(c_int64))


def _typed(
    function: ctypes._FuncPointer, result: type | None, *arguments: type
) -> ctypes._FuncPointer:  # type: ignore[name-defined]
    function.restype, function.argtypes = result, arguments
    return function


@cache
def _loaded() -> tuple[Calls | None, str]:
    return loaded("engine", Calls)


def calls() -> Calls | None:
    """None where `lacking` says why. Ranks of both kinds share memory with each other; streams need
    it on all (opening.py)."""
    return None if _refused() else _loaded()[0]


def lacking() -> str:
    """Why there is no engine, or nothing: it cannot be compiled, kept or loaded, or
    FREESCALE_ENGINE=0 asks for Python. In the environment and not in a run's settings, because it
    is an affair of one machine."""
    return "FREESCALE_ENGINE=0" if _refused() else _loaded()[1]


def _refused() -> bool:
    return os.environ.get("FREESCALE_ENGINE", "1") == "0"
