"""Chooses the transport of a run, and says why: a pure function of what the ranks have."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

TRANSPORTS = ("auto", "collective", "hostwire-tcp", "hostwire-ucx")
# Names in old configurations, and what carries the same traffic now.
FORMER = {"hostwire-gloo": "hostwire-tcp"}


def is_ucx_installed() -> bool:
    return importlib.util.find_spec("ucxx") is not None


def find_rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices, as the kernel lists them."""
    folder = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def depends_on_engine(requested: str) -> bool:
    """Whether the choice depends on the engine in C. If not, nothing is compiled."""
    return requested in ("auto", "hostwire-tcp")


def choose_transport(
    requested: str, device: str, machines: int, ucx: bool, rdma: bool, engine: bool
) -> tuple[str, str]:
    """Chooses what carries a run's traffic. Returns one of TRANSPORTS but auto, and the reason.
    `ucx`, `rdma`, `engine`: whether every rank has the package ucxx, an RDMA device, the engine in
    C. ValueError if the request is unknown, or UCX is requested and missing."""
    if requested not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {requested!r}")
    if requested == "hostwire-ucx" and not ucx:
        raise ValueError(
            "transport hostwire-ucx needs the package ucxx on every rank: "
            "pip install 'freescale[ucx]'"
        )
    several_gpus = device == "cuda" and machines > 1
    if requested == "auto" and several_gpus and ucx and rdma:
        return "hostwire-ucx", "copy engines and RDMA (UCX) carry what is not summed, NCCL the rest"
    if depends_on_engine(requested) and not engine:
        return "collective", "hostwire-tcp needs the engine in C, which is missing"
    if requested != "auto":
        return requested, "as requested"
    if several_gpus:
        wanted = {"ucxx": ucx, "an RDMA device": rdma}
        missing = " and ".join(what for what, there in wanted.items() if not there)
        why = "copy engines and TCP carry what is not summed, NCCL the rest; for UCX "
        return "hostwire-tcp", f"{why}{missing} is missing"
    if device == "cuda":
        return "hostwire-tcp", (
            "GPUs of one machine: copy engines and shared memory carry what is not summed, "
            "NCCL the rest"
        )
    if machines == 1:
        return "hostwire-tcp", (
            "CPU ranks of one machine: shared memory carries what is not summed, at a fraction of "
            "the processor time of gloo"
        )
    return "hostwire-tcp", (
        "CPU ranks on several machines: urgent traffic overtakes bulk traffic, at less "
        "processor time than gloo"
    )


def explain_fallback(missing: Sequence[str]) -> str:
    """Why ranks use process groups instead of hostwire: `missing` says why each has no engine."""
    ranks = [rank for rank, why in enumerate(missing) if why]
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    named += ", ..." if len(ranks) > 8 else ""
    return (
        f"hostwire's engine in C is missing on {named} ({missing[ranks[0]]}): all ranks use "
        "process groups (--transport collective)"
    )
