"""The command doctor: what this machine has and what would run on it."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from freescale.cli.errors import exit_cleanly
from freescale.transport.choice import choose_transport, find_rdma_devices, is_ucx_installed

Row = tuple[str, str, str]  # what, found, what follows
TESTED_TORCH = ((2, 11), (2, 15))  # first and last; as in pyproject.toml


@click.command()
@exit_cleanly
def doctor() -> None:
    """Show what this machine has and what would run on it.

    Checks Python, torch, GPUs, communication backends, RDMA, UCX, shared memory and Triton.
    """
    rows = examine()
    for what, found, follows in (rows[-1], *rows[:-1]):  # what would run comes first
        click.echo(f"{what:<24}{found:<26}{follows}")


def examine() -> list[Row]:
    """Tries everything that a run may use; one row for each."""
    import platform

    import torch
    import torch.distributed as dist

    from freescale.transport.hostwire.bindings import explain_missing_engine

    supported = sys.version_info[:2] >= (3, 11)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tested = TESTED_TORCH[0] <= version <= TESTED_TORCH[1]
    first, last = (".".join(map(str, each)) for each in TESTED_TORCH)
    cores, has_gpu = os.cpu_count(), torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    no_engine = explain_missing_engine()  # tries to compile it
    available = dist.is_available()
    gloo, nccl = available and dist.is_gloo_available(), available and dist.is_nccl_available()
    gpus = torch.cuda.device_count() if has_gpu else 0
    plan = f"takes {gpus} GPU(s), NCCL" if gpus else "takes the CPU, gloo"
    return [
        ("python", platform.python_version(), "ok" if supported else "3.11 or newer is needed"),
        ("torch", torch.__version__, "ok" if tested else f"{first} to {last} are tested"),
        ("cpu cores", str(cores), f"up to {cores} ranks without sharing a core"),
        *_check_gpus(torch),
        ("gloo", _yes(gloo), "ranks on CPU, and control traffic"),
        ("nccl", _yes(nccl), "ranks on GPUs" if nccl else "GPU ranks need a CUDA build of torch"),
        _check_rdma(),
        _check_ucx(),
        _check_shared_memory(torch),
        _check_engine(no_engine),
        ("transport, one machine", *_choose_transport(device, 1, not no_engine)),
        ("transport, several", *_choose_transport(device, 2, not no_engine)),
        _check_descriptors(device),
        _check_kernels(has_gpu, _find_triton()),
        _check_package("pyarrow", "data files"),
        _check_package("rich", "terminal output"),
        _check_package("safetensors", "freescale export"),
        _check_package("tensorboard", "--tensorboard"),
        (
            "would run",
            f"freescale train --nproc {gpus or min(cores or 1, 2)}",
            f"--device auto {plan}",
        ),
    ]


def _find_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check_package(name: str, purpose: str) -> Row:
    if found := _find_version(name):
        return (name, found, purpose)
    return (name, "no", f"needed for {purpose}: pip install {name}")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _check_gpus(torch: Any) -> list[Row]:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        reason = "no GPU or no driver is visible" if built else "this build of torch has no CUDA"
        return [("gpu", "none", reason)]
    rows = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        size = f"{found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        rows.append((f"gpu {index}", found.name, size))
    return rows


def _find_triton() -> str | None:
    """Its version; None if the kernels would not find it."""
    from freescale.kernels.dispatch.versions import has_triton

    return (_find_version("triton") or "yes") if has_triton() else None


def _check_kernels(gpu: bool, triton: str | None) -> Row:
    """What `kernels.dispatch` chooses on a machine with or without a GPU and Triton."""
    from freescale.kernels.attention.triton import FLOAT32_WIDTHS, WIDTHS

    if not gpu:
        return ("triton", triton or "no", "not used: on CPUs plain torch kernels run")
    if triton is None:
        slow = "plain torch kernels run, slowly on GPUs: pip install triton (Linux)"
        return ("triton", "no", slow)
    return (
        "triton",
        triton,
        f"Triton kernels run; attention and layers only where --width / --heads is at most "
        f"{WIDTHS[-1]} (float32: {FLOAT32_WIDTHS[-1]})",
    )


def _check_rdma() -> Row:
    if devices := find_rdma_devices():
        use = "NCCL uses it; gloo and UCX do where they were built with ibverbs"
        return ("rdma", ", ".join(devices), use)
    return ("rdma", "no", "no device under /sys/class/infiniband: traffic goes over TCP")


def _check_ucx() -> Row:
    names = ("ucxx-cu13", "ucxx-cu12", "ucxx")
    found = next((f"{name} {_find_version(name)}" for name in names if _find_version(name)), None)
    if found and is_ucx_installed():
        return ("ucx", found, "for --transport hostwire-ucx; UCX_TLS says what it may use")
    return ("ucx", "no", "needed for --transport hostwire-ucx: pip install 'freescale[ucx]'")


def _check_shared_memory(torch: Any) -> Row:
    """Tries what hostwire needs between ranks of one machine."""
    from freescale.transport.hostwire.channel import Pinned, create_shared_file

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        file = create_shared_file(1 << 20)
        try:
            Pinned(1 << 20, device, file).close()
        finally:
            os.close(file)
    except (AttributeError, OSError, RuntimeError) as error:
        return ("shared memory", "no", f"hostwire-tcp fails: pass --transport collective ({error})")
    use = "ranks of one machine exchange through it (hostwire-tcp)"
    return ("shared memory", "yes", use)


def _check_engine(missing: str) -> Row:
    if missing:
        fallback = "--transport auto and hostwire-tcp fall back to collective"
        return ("engine", "no", f"{fallback}: {missing}")
    use = "transfers inside a machine and over TCP run in C, without Python's lock"
    return ("engine", "yes", use)


def _choose_transport(device: str, machines: int, engine: bool) -> tuple[str, str]:
    rdma = bool(find_rdma_devices())
    return choose_transport("auto", device, machines, is_ucx_installed(), rdma, engine)


def _check_descriptors(device: str) -> Row:
    from freescale.transport.descriptors import count_fitting_ranks, count_per_rank, read_hard_limit

    limit = read_hard_limit()
    if limit is None:
        return ("open files", "unlimited", "any number of ranks")
    name, _ = _choose_transport(device, 2, engine=True)
    fits = (
        f"about {count_fitting_ranks(name, device, limit):,} ranks fit over {name}: "
        f"{count_per_rank(name, device)} for each other rank"
    )
    shared = f"{count_per_rank('hostwire-tcp', device, neighbour=True)} over shared memory"
    return ("open files", f"{limit:,}", f"{fits}, {shared}")
