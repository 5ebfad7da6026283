"""Which machine this process is on."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def identify_machine() -> bytes:
    """A name that is equal on ranks that can share memory: one kernel, one network (a network
    namespace counts as a machine of its own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}".encode()
    except OSError:
        return b"alone %d %s" % (os.getpid(), uuid.uuid4().bytes)
