"""The Triton kernel of `witness`: it keeps every multiprocessor that it gets from anybody else, for
a given time."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def busy_kernel(end, nanoseconds):
    """end [1] int64, 0 at first: the first program says when all of them end, by the device's
    clock. Those that find no place until then return at once."""
    now = globaltimer()
    mine = now + nanoseconds
    found = tl.atomic_cas(end, now * 0, mine)
    until = tl.where(found == 0, mine, found)
    while now < until:
        now = globaltimer()
