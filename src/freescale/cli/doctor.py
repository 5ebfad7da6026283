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


def _find_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def examine() -> list[Row]:
    """Tries everything that a run may use; one row for each."""
    import platform

    import torch
    import torch.distributed as dist

    rows: list[Row] = []
    supported = sys.version_info[:2] >= (3, 11)
    rows.append(
        ("python", platform.python_version(), "ok" if supported else "3.11 or newer is needed")
    )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tested = TESTED_TORCH[0] <= version <= TESTED_TORCH[1]
    first, last = (".".join(map(str, each)) for each in TESTED_TORCH)
    rows.append(("torch", torch.__version__, "ok" if tested else f"{first} to {last} are tested"))
    rows.append(
        ("cpu cores", str(os.cpu_count()), f"up to {os.cpu_count()} ranks without sharing a core")
    )
    rows += _check_gpus(torch)
    available = dist.is_available()
    rows.append(
        (
            "gloo",
            _yes(available and dist.is_gloo_available()),
            "ranks on CPU, and control traffic",
        )
    )
    nccl = available and dist.is_nccl_available()
    rows.append(
        ("nccl", _yes(nccl), "ranks on GPUs" if nccl else "GPU ranks need a CUDA build of torch")
    )
    rows.append(_check_rdma())
    rows.append(_check_ucx())
    rows.append(_check_shared_memory(torch))
    rows.append(_check_engine())
    rows += _check_transports(torch)
    rows.append(_check_descriptors(torch))
    rows.append(_check_kernels(torch.cuda.is_available(), _find_triton()))
    for name, purpose in (
        ("pyarrow", "data files"),
        ("rich", "terminal output"),
        ("safetensors", "freescale export"),
        ("tensorboard", "--tensorboard"),
    ):
        found = _find_version(name)
        rows.append(
            (
                name,
                found or "no",
                purpose if found else f"needed for {purpose}: pip install {name}",
            )
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    plan = (
        f"--device auto takes {gpus} GPU(s), NCCL" if gpus else "--device auto takes the CPU, gloo"
    )
    rows.append(
        ("would run", f"freescale train --nproc {gpus or min(os.cpu_count() or 1, 2)}", plan)
    )
    return rows


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _check_gpus(torch: Any) -> list[Row]:
    if not torch.cuda.is_available():
        reason = (
            "this build of torch has no CUDA"
            if torch.version.cuda is None
            else "no GPU or no driver is visible"
        )
        return [("gpu", "none", reason)]
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            (
                f"gpu {index}",
                properties.name,
                (
                    f"{properties.total_memory / 2**30:.0f} GiB, "
                    f"sm_{properties.major}{properties.minor}"
                ),
            )
        )
    return rows


def _find_triton() -> str | None:
    """Its version; None where the kernels would not find it."""
    from freescale.kernels.dispatch.versions import has_triton

    return (_find_version("triton") or "yes") if has_triton() else None


def _check_kernels(gpu: bool, triton: str | None) -> Row:
    """What `kernels.dispatch` chooses on a machine with or without a GPU and Triton."""
    from freescale.kernels.attention.triton import FLOAT32_WIDTHS, WIDTHS

    if not gpu:
        return ("triton", triton or "no", "not used: on CPUs plain torch kernels run")
    if triton is None:
        return (
            "triton",
            "no",
            "plain torch kernels run, slowly on GPUs: pip install triton (Linux)",
        )
    return (
        "triton",
        triton,
        f"Triton kernels run; attention and layers only where --width / --heads is at most "
        f"{WIDTHS[-1]} (float32: {FLOAT32_WIDTHS[-1]})",
    )


def _check_rdma() -> Row:
    if devices := find_rdma_devices():
        return (
            "rdma",
            ", ".join(devices),
            "NCCL uses it; gloo and UCX do where they were built with ibverbs",
        )
    return ("rdma", "no", "no device under /sys/class/infiniband: traffic goes over TCP")


def _check_ucx() -> Row:
    names = ("ucxx-cu13", "ucxx-cu12", "ucxx")
    found = next((f"{name} {_find_version(name)}" for name in names if _find_version(name)), None)
    if found and is_ucx_installed():
        return ("ucx", found, "for --transport hostwire-ucx; UCX_TLS says what it may use")
    return ("ucx", "no", "needed for --transport hostwire-ucx: pip install 'freescale[ucx]'")


def _check_shared_memory(torch: Any) -> Row:
    """Tries what hostwire needs between ranks of one machine."""
    from freescale.transport.hostwire.pinned import Pinned, create_shared_file

    try:
        file = create_shared_file(1 << 20)
        try:
            Pinned(
                1 << 20, torch.device("cuda" if torch.cuda.is_available() else "cpu"), file
            ).close()
        finally:
            os.close(file)
    except (AttributeError, OSError, RuntimeError) as error:
        return ("shared memory", "no", f"ranks of one machine talk over sockets: {error}")
    return (
        "shared memory",
        "yes",
        "ranks of one machine exchange through it (hostwire-gloo and -tcp)",
    )


def _check_engine() -> Row:
    """Tries to compile it."""
    from freescale.transport.hostwire.bindings import explain_missing_engine

    if not (why := explain_missing_engine()):
        return (
            "engine",
            "yes",
            "transfers inside a machine and over TCP run in C, without Python's lock",
        )
    return (
        "engine",
        "no",
        (
            "transfers run in Python, which slows GPU ranks down, and there is "
            f"no hostwire-tcp: {why}"
        ),
    )


def _check_transports(torch: Any) -> list[Row]:
    from freescale.transport.hostwire.bindings import explain_missing_engine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for machines in (1, 2):
        name, why = choose_transport(
            "auto",
            device,
            machines,
            is_ucx_installed(),
            bool(find_rdma_devices()),
            not explain_missing_engine(),
        )
        rows.append((f"transport, {'one machine' if machines == 1 else 'several'}", name, why))
    return rows


def _check_descriptors(torch: Any) -> Row:
    from freescale.transport.descriptors import count_fitting_ranks, count_per_rank, read_hard_limit

    limit, device = read_hard_limit(), "cuda" if torch.cuda.is_available() else "cpu"
    if limit is None:
        return ("open files", "unlimited", "any number of ranks")
    name, _ = choose_transport(
        "auto", device, 2, is_ucx_installed(), bool(find_rdma_devices()), engine=True
    )
    fits = (
        f"about {count_fitting_ranks(name, device, limit):,} ranks fit over {name}: "
        f"{count_per_rank(name, device)} for each other rank"
    )
    return (
        "open files",
        f"{limit:,}",
        f"{fits}, {count_per_rank('hostwire-tcp', device, neighbour=True)} over shared memory",
    )
