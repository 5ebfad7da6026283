"""The wires that hostwire's tests run over."""

from __future__ import annotations

import os

WIRES = ["shared memory", "gloo", "ucx: tcp", "ucx: shared memory", "shared memory: mixed", "tcp"]


def wired(wire: str, rank: int = 0) -> tuple[str, bool]:
    """(wire, shared) of a HostwireTransport, in a rank; UCX is told what to use before it is
    loaded. Mixed: odd ranks have no compiler."""
    if wire.startswith("ucx"):
        os.environ["UCX_TLS"] = "tcp,self" if wire.endswith("tcp") else "sm,self"
        os.environ["UCX_NET_DEVICES"] = "lo" if wire.endswith("tcp") else "all"
        return "ucx", False
    if wire == "tcp":
        return "tcp", False
    os.environ["FREESCALE_ENGINE"] = "0" if wire.endswith("mixed") and rank % 2 else "1"
    return "gloo", wire.startswith("shared memory")
