"""The precision of the compute: chosen before step 1, held while a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

PRECISIONS = ("auto", "fp32", "tf32", "bf16")


def choose_precision(
    requested: str, device: str, bf16: bool, float32: bool = True
) -> tuple[str, str]:
    """Chooses the precision of a run, and says why. A pure function: the same on every rank with
    such a device. `bf16`: whether the device multiplies bfloat16 in hardware. `float32`: whether
    all dense parameters are float32; others keep their dtype. ValueError if the request is unknown,
    or not possible on this device."""
    if requested not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {requested!r}")
    if requested == "tf32" and device != "cuda":
        raise ValueError(
            f"precision tf32 is a format of NVIDIA GPUs and this rank computes on {device}: "
            "use fp32, bf16 or auto"
        )
    if requested != "auto":
        return requested, "as requested"
    if device != "cuda":
        return "fp32", "on CPUs"
    if not float32:
        return "fp32", "the parameters have a dtype of their own"
    if not bf16:
        return "fp32", "this GPU has no bf16"
    return "bf16", "this GPU has it; parameters, rows and sums stay float32"


def supports_bf16(device: torch.device) -> bool:
    """Whether the device has units for it: older GPUs only emulate bf16, slowly."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Around a forward."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def hold_matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Around forward and backward on a GPU: torch's products and convolutions of float32 tensors
    are in float32 with fp32, and in TF32 with tf32, whatever the process has set; that setting is
    back afterwards. bf16 leaves it alone. Attention in float32 has kernels of its own, which are
    as exact with both."""
    if device.type != "cuda" or precision == "bf16":
        yield
        return
    before = _read_settings()
    tf32 = precision == "tf32"
    _write_settings(
        ["high" if tf32 else "highest", tf32]
        if len(before) == 2
        else ["tf32" if tf32 else "ieee"] * 3
    )
    try:
        yield
    finally:
        _write_settings(before)


def _read_settings() -> list[Any]:
    """torch has two interfaces to the same settings. Reading through the first fails where the
    process has written through the second; the first is preferred because compiled modules read
    it."""
    try:
        return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    except RuntimeError:
        return [holder.fp32_precision for holder in _list_holders()]


def _write_settings(values: list[Any]) -> None:
    if len(values) == 2:
        torch.set_float32_matmul_precision(values[0])
        torch.backends.cudnn.allow_tf32 = values[1]
        return
    for holder, value in zip(_list_holders(), values, strict=True):
        holder.fp32_precision = value


def _list_holders() -> list[Any]:
    """Of the second interface."""
    cudnn: Any = torch.backends.cudnn
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
