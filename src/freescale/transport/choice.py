"""Which transport a run takes, and why. A pure function of what is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TRANSPORTS = ("auto", "collective", "hostwire-gloo", "hostwire-tcp", "hostwire-ucx")


def ucx_installed() -> bool:
    return importlib.util.find_spec("ucxx") is not None


def rdma_devices() -> list[str]:
    folder = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def may_need_engine(asked: str, device: str) -> bool:
    """Whether the choice depends on what is compiled. Where it does not, nothing is."""
    return asked == "auto" and device != "cpu"


def choose(
    asked: str, device: str, machines: int, ucx: bool, rdma: bool, engine: bool
) -> tuple[str, str]:
    """(transport, why). `device`: cpu or cuda. `machines`: that the ranks are on. `ucx`, `rdma`,
    `engine` (in C): whether every rank has it."""
    if asked not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {asked!r}")
    if asked == "hostwire-ucx" and not ucx:
        raise ValueError(
            "transport hostwire-ucx needs the package ucxx on every rank: pip "
            "install 'freescale[ucx]'"
        )
    if asked != "auto":
        return asked, "as asked"
    if device == "cpu":
        return (
            "collective",
            (
                "on CPUs there are no multiprocessors to spare; hostwire-tcp lets urgent traffic "
                "overtake"
            ),
        )
    if machines == 1:
        return (
            "hostwire-gloo",
            (
                "GPUs of one machine: copy engines and shared memory carry what is not summed, "
                "NCCL "
                "the rest"
            ),
        )
    if ucx and rdma:
        return "hostwire-ucx", "copy engines and RDMA (UCX) carry what is not summed, NCCL the rest"
    lacking = " and ".join(
        what for what, there in (("ucxx", ucx), ("an RDMA device", rdma)) if not there
    )
    if engine:
        return (
            "hostwire-tcp",
            (
                f"copy engines and TCP carry what is not summed, NCCL the rest; for UCX {lacking} "
                "is "
                "missing"
            ),
        )
    why = (
        "copy engines and TCP (gloo) carry what is not summed, NCCL the rest; for UCX "
        f"{lacking} is missing"
    )
    return "hostwire-gloo", f"{why}, for hostwire-tcp the engine (freescale doctor says why)"
