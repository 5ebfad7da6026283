"""The Triton kernel of `witness`: it occupies its multiprocessors for a given time."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def busy_kernel(end, nanoseconds):
    """end [1] int64, initially 0: the first program sets when all end, by the device's clock.
    Programs that start later return at once."""
    now = globaltimer()
    mine = now + nanoseconds
    found = tl.atomic_cas(end, now * 0, mine)
    until = tl.where(found == 0, mine, found)
    while now < until:
        now = globaltimer()
