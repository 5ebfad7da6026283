"""Describes the machine and the versions of what runs on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Returns CPU, cores, memory and GPU of this machine."""
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = _find_entry(info, "model name")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = model or _lscpu() or platform.machine()
    return {
        "cpu": cpu,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpu": gpu,
    }


def _lscpu() -> str | None:
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return _find_entry(done.stdout, "Model name")


def _find_entry(text: str, name: str) -> str | None:
    lines = (line for line in text.splitlines() if line.startswith(name))
    return next((line.split(":", 1)[1].strip() for line in lines), None)


def get_versions(*packages: str) -> dict[str, str]:
    """Versions of Python, torch (with build, as `2.15.0+cu132`), numpy and installed `packages`."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("numpy", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
