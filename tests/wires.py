"""The wires that hostwire's tests run over."""

from __future__ import annotations

import os

WIRES = ["shared memory", "gloo", "ucx: tcp", "ucx: shared memory"]


def wired(wire: str) -> tuple[str, bool]:
    """(kind, shared) of a Hostwire, in a rank; UCX is told what to use before it is loaded."""
    if wire.startswith("ucx"):
        os.environ["UCX_TLS"] = "tcp,self" if wire.endswith("tcp") else "sm,self"
        os.environ["UCX_NET_DEVICES"] = "lo" if wire.endswith("tcp") else "all"
        return "ucx", False
    return "gloo", wire == "shared memory"
