"""Chooses the transport of a run, and says why: a pure function of what the ranks have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TRANSPORTS = ("auto", "collective", "hostwire-gloo", "hostwire-tcp", "hostwire-ucx")


def is_ucx_installed() -> bool:
    return importlib.util.find_spec("ucxx") is not None


def find_rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices, as the kernel lists them."""
    folder = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def depends_on_engine(requested: str) -> bool:
    """Whether the choice depends on the compiled engine. Where it does not, nothing is compiled."""
    return requested == "auto"


def choose_transport(
    requested: str, device: str, machines: int, ucx: bool, rdma: bool, engine: bool
) -> tuple[str, str]:
    """Chooses what carries a run's traffic. Returns one of TRANSPORTS but auto, and the reason.
    `ucx`, `rdma`, `engine`: whether every rank has the package ucxx, an RDMA device, the engine in
    C. ValueError if the request is unknown, or not possible here."""
    if requested not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {requested!r}")
    if requested == "hostwire-ucx" and not ucx:
        raise ValueError(
            "transport hostwire-ucx needs the package ucxx on every rank: "
            "pip install 'freescale[ucx]'"
        )
    if requested != "auto":
        return requested, "as requested"
    if device == "cpu" and machines == 1 and engine:
        return "hostwire-gloo", (
            "CPU ranks of one machine: shared memory carries what is not summed, at a fraction of "
            "the processor time of gloo"
        )
    if device == "cpu" and engine:
        return "hostwire-tcp", (
            "CPU ranks on several machines: urgent traffic overtakes bulk traffic, at less "
            "processor time than gloo"
        )
    if device == "cpu":
        what = "hostwire-tcp" if machines > 1 else "shared memory"
        return "collective", (
            f"{what} needs the engine in C; freescale doctor says why it is missing"
        )
    if machines == 1:
        return "hostwire-gloo", (
            "GPUs of one machine: copy engines and shared memory carry what is not summed, "
            "NCCL the rest"
        )
    if ucx and rdma:
        return "hostwire-ucx", "copy engines and RDMA (UCX) carry what is not summed, NCCL the rest"
    missing = " and ".join(
        what for what, there in (("ucxx", ucx), ("an RDMA device", rdma)) if not there
    )
    if engine:
        return "hostwire-tcp", (
            "copy engines and TCP carry what is not summed, NCCL the rest; "
            f"for UCX {missing} is missing"
        )
    return "hostwire-gloo", (
        "copy engines and TCP (gloo) carry what is not summed, NCCL the rest; "
        f"for UCX {missing} is missing, for hostwire-tcp the engine (freescale doctor says why)"
    )
