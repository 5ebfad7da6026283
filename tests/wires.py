"""The wires that hostwire's tests run over."""

from __future__ import annotations

import os

WIRES = ["shared memory", "gloo"]


def wired(wire: str) -> tuple[str, bool]:
    """(kind, shared) of a Hostwire, in a rank; UCX is told what to use before it is loaded."""
    kind, _, lanes = wire.partition(":")
    if kind == "ucx":
        os.environ["UCX_TLS"] = lanes
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        return "ucx", False
    return "gloo", wire == "shared memory"
