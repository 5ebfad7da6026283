"""The wires that hostwire's tests run over."""

from __future__ import annotations

import os

WIRES = ["shared memory", "tcp", "ucx: tcp", "ucx: shared memory"]


def wired(wire: str) -> tuple[str, bool]:
    """(wire, shared) of a HostwireTransport, in a rank. Sets what UCX may use, before it is
    loaded."""
    if wire.startswith("ucx"):
        os.environ["UCX_TLS"] = "tcp,self" if wire.endswith("tcp") else "sm,self"
        os.environ["UCX_NET_DEVICES"] = "lo" if wire.endswith("tcp") else "all"
        return "ucx", False
    return "tcp", wire == "shared memory"
