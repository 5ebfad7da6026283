"""What this machine has and what would run on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> list[tuple[str, str, str]]:
    """Rows of (what, found, what follows)."""
    import torch
    import torch.distributed as dist

    rows: list[tuple[str, str, str]] = []
    supported = sys.version_info[:2] >= (3, 11)
    rows.append(("python", platform.python_version(), "ok" if supported else "3.11 or newer is needed"))
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tested = (2, 11) <= version <= (2, 13)
    rows.append(("torch", torch.__version__, "ok" if tested else "2.11 to 2.13 are tested"))
    rows.append(("cpu cores", str(os.cpu_count()), f"up to {os.cpu_count()} ranks without sharing a core"))
    rows += _gpus(torch)
    available = dist.is_available()
    rows.append(("gloo", _yes(available and dist.is_gloo_available()), "ranks on CPU, and control traffic"))
    nccl = available and dist.is_nccl_available()
    rows.append(("nccl", _yes(nccl), "ranks on GPUs" if nccl else "GPU ranks need a CUDA build of torch"))
    rows.append(_rdma())
    rows.append(_ucx())
    triton = _package("triton")
    use = (
        "plain torch kernels run" if triton is None or not torch.cuda.is_available() else "plain torch kernels run; Triton is there"
    )
    rows.append(("triton", triton or "no", use))
    for name, purpose in (
        ("pyarrow", "data files"),
        ("rich", "terminal output"),
        ("safetensors", "freescale export"),
        ("tensorboard", "--tensorboard"),
    ):
        found = _package(name)
        rows.append((name, found or "no", purpose if found else f"needed for {purpose}: pip install {name}"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    plan = f"--device auto takes {gpus} GPU(s), NCCL" if gpus else "--device auto takes the CPU, gloo"
    rows.append(("would run", f"freescale train --nproc {gpus or min(os.cpu_count() or 1, 2)}", plan))
    return rows


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _gpus(torch) -> list[tuple[str, str, str]]:  # type: ignore[no-untyped-def]
    if not torch.cuda.is_available():
        reason = "this build of torch has no CUDA" if torch.version.cuda is None else "no GPU or no driver is visible"
        return [("gpu", "none", reason)]
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            (f"gpu {index}", properties.name, f"{properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}")
        )
    return rows


def _rdma() -> tuple[str, str, str]:
    folder = Path("/sys/class/infiniband")
    devices = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if devices:
        return ("rdma", ", ".join(devices), "NCCL uses it; gloo does where torch was built with ibverbs")
    return ("rdma", "no", "no device under /sys/class/infiniband: traffic goes over TCP")


def _ucx() -> tuple[str, str, str]:
    names = ("ucxx-cu13", "ucxx-cu12", "ucxx")
    found = next((f"{name} {_package(name)}" for name in names if _package(name)), None)
    if found and importlib.util.find_spec("ucxx"):
        return ("ucx", found, "importable; no schedule of this version uses it")
    return ("ucx", "no", "not installed; no schedule of this version needs it")
