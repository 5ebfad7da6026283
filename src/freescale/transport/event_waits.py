"""Waits of the host for events of a GPU.

To be woken takes longer than many a copy, so a thread polls for a moment before it sleeps: in C,
without Python's lock, which torch's own query would keep from the thread that launches kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_int, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from freescale.compiled import compile_and_load, declare

SOURCE = Path(__file__).with_name("csrc") / "event_waits.c"
HAPPENED = 0  # CUDA_SUCCESS
_SPIN = 0.0003  # seconds

Poll = Callable[[Any, int, float], int]  # (cuEventQuery, event, seconds) -> its last answer


def wait_for_event(event: torch.cuda.Event) -> None:
    """Blocks the host: polls for a moment, then sleeps if the event was made with blocking=True."""
    poll, query = load_poll(), find_query()
    if poll is None or query is None or poll(query, event.cuda_event, _SPIN) != HAPPENED:
        event.synchronize()  # raises what went wrong


@cache
def load_poll() -> Poll | None:
    """`poll_event` of csrc/event_waits.c; None where it cannot be compiled."""
    types = c_int, c_void_p, c_void_p, c_double
    # calls through CDLL release Python's lock
    return compile_and_load(SOURCE, lambda path: declare(ctypes.CDLL(path).poll_event, *types))[0]


@cache
def find_query() -> int | None:
    """The address of cuEventQuery; None without CUDA's driver."""
    try:
        return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuEventQuery, c_void_p).value
    except (OSError, AttributeError):
        return None
