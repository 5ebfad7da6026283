"""Starts the local ranks of a benchmark, and joins them as one. Ranks that have to share a GPU get
equal parts of it from CUDA's MPS, which is started for the run and ended with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from freescale.launch.ranks import is_rank, launch
from freescale.transport.api import Transport
from freescale.transport.connect import connect
from freescale.transport.process_group import ProcessGroupTransport
from freescale.transport.shared_gpu import PART, list_settings
from freescale_bench.common.repository import package_path

_CONTROL = "nvidia-cuda-mps-control"


def start_ranks(
    name: str,
    arguments: Sequence[str],
    ranks: int,
    device: str,
    seconds: float,
    threads: int | None = None,
) -> int:
    """Runs `python -m freescale_bench.NAME ARGUMENTS` as `ranks` local ranks. If one fails, all
    stop.

    Args:
        threads: OMP_NUM_THREADS of a rank, unless it is set; by default the launcher decides.

    Returns:
        0 if all succeeded.

    Raises:
        TimeoutError: the run took longer than `seconds`, and was stopped.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise ValueError(
            "there is no GPU here; try the benchmark with --device cpu: tiny sizes, "
            "times that say nothing"
        )
    shared = 0 < gpus < ranks
    with ExitStack() as stack:
        divided = stack.enter_context(share_gpu(ranks)) if shared else {}

        def extra(rank: int) -> dict[str, str]:
            given = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
            return {
                "PYTHONPATH": package_path(),
                **(given if threads else {}),
                **divided,
                **list_settings(rank, ranks, shared),
            }

        module = f"freescale_bench.{name}"
        return launch(arguments, ranks, module=module, extra=extra, seconds=seconds)


def join(device: str, seconds: float, transport: str = "collective") -> ProcessGroupTransport:
    """This process as a rank: on cuda:0 where ranks share a GPU, else on its own. `seconds` bound
    every collective; `transport` as of `connect`."""
    rank, ranks = (
        int(os.environ["RANK"]),
        int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
    )
    chosen = torch.device("cpu")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "there is no GPU here; try the benchmark with --device cpu: tiny "
                "sizes, times that say nothing"
            )
        shared = torch.cuda.device_count() < ranks
        os.environ.update(list_settings(rank, ranks, shared))  # torchrun sets none of this
        chosen = torch.device("cuda", 0 if shared else int(os.environ.get("LOCAL_RANK", rank)))
    joined = connect(chosen, seconds, transport=transport)
    assert isinstance(joined, ProcessGroupTransport), "RANK is set: there is a process group"
    return joined


@contextmanager
def open_rank(device: str, seconds: float) -> Iterator[tuple[Transport, Path]]:
    """This process as a rank, or alone, and a folder that the ranks of the machine share; until the
    end of the block, which the ranks reach together. `seconds` bound every collective."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; try the benchmark with --device cpu")
    transport: Transport = join(device, seconds, "auto") if is_rank() else connect(device)
    with tempfile.TemporaryDirectory() as temporary:
        # rank 0's, which is gone once all of them have read it
        yield transport, Path(transport.gather_bytes(temporary.encode())[0].decode())
        transport.gather_bytes(b"")
    transport.close()


@contextmanager
def share_gpu(ranks: int) -> Iterator[dict[str, str]]:
    """MPS, from here to the end of the block. Yields what its clients have in their environment."""
    control = shutil.which(_CONTROL)
    if control is None:
        raise ValueError(
            f"{ranks} ranks on fewer GPUs share them by CUDA's MPS, and {_CONTROL} "
            "is not installed here"
        )
    folders = {
        name: tempfile.mkdtemp(prefix="mps-")
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    }
    environment = {**os.environ, **folders}
    try:
        # The daemon keeps what it inherits: a pipe of ours would never end.
        quiet = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        begun = subprocess.run([control, "-d"], env=environment, timeout=30, check=False, **quiet)  # type: ignore[call-overload]
        if begun.returncode:
            raise ValueError(
                f"CUDA's MPS does not start here ({_CONTROL} -d ended with status "
                f"{begun.returncode})"
            )
        yield {**folders, PART: str(100 // ranks)}
    finally:
        try:
            subprocess.run(
                [control],
                env=environment,
                input="quit\n",
                text=True,
                timeout=15,
                capture_output=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(
                f"CUDA's MPS did not end; `echo quit | {_CONTROL}` with {folders}", file=sys.stderr
            )
        else:
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)
