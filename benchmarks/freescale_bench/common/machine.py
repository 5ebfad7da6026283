"""The machine's name and settings, as result files hold them."""

from __future__ import annotations

import os

import torch


def get_gpu_name() -> str:
    """Short name of the first GPU, as in the names of result files: `h200`. Empty without one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return "-".join(name.lower().removeprefix("nvidia ").split())


def get_gpu_settings() -> dict[str, str]:
    """Environment variables that configure CUDA and NCCL."""
    prefixes = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NCCL_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
