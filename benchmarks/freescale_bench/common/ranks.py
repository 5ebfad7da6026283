"""Starts the local ranks of a benchmark, and joins them as one of them. Ranks that share a GPU get
equal parts of it through CUDA's MPS, which runs only during the benchmark."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from freescale.launch.ranks import is_rank, launch
from freescale.transport.api import Transport
from freescale.transport.connect import connect
from freescale.transport.process_group import ProcessGroupTransport
from freescale.transport.shared_gpu import PART, list_settings
from freescale_bench.common.repository import package_path

_CONTROL = "nvidia-cuda-mps-control"
MPS_SECONDS = 60.0  # limit of its beginning, and of its end


def get_gpu_name() -> str:
    """Short name of the first GPU, as in the names of result files: `h200`. Empty without one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return "-".join(name.lower().removeprefix("nvidia ").split())


def get_gpu_settings() -> dict[str, str]:
    """Environment variables that configure CUDA and NCCL."""
    prefixes = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NCCL_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def require_gpu(device: str) -> None:
    """Raises ValueError if `device` is cuda and there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here; --device cpu runs tiny sizes, to try the code")


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
        threads: OMP_NUM_THREADS of a rank, if not set already; None: the launcher decides.

    Returns:
        0 if all ranks succeeded.

    Raises:
        TimeoutError: the run took longer than `seconds` and was stopped.
    """
    require_gpu(device)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
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
    """Connects this process as a rank, on cuda:0 if ranks share a GPU, else on its own GPU.
    `seconds` limits every collective; `transport` as for `connect`."""
    require_gpu(device)
    rank = int(os.environ["RANK"])
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    chosen = torch.device("cpu")
    if device == "cuda":
        shared = torch.cuda.device_count() < ranks
        os.environ.update(list_settings(rank, ranks, shared))  # torchrun does not set them
        chosen = torch.device("cuda", 0 if shared else int(os.environ.get("LOCAL_RANK", rank)))
    joined = connect(chosen, seconds, transport=transport)
    assert isinstance(joined, ProcessGroupTransport), "RANK is set: there is a process group"
    return joined


def gather_json(transport: Transport, value: Any) -> list[Any]:
    """Gathers a JSON value of every rank, in rank order. A collective."""
    return [json.loads(part) for part in transport.gather_bytes(json.dumps(value).encode())]


@contextmanager
def open_rank(device: str, seconds: float) -> Iterator[tuple[Transport, Path]]:
    """Connects this process as a rank, or alone. Yields the transport and a folder that all
    ranks of the machine share. The ranks leave the block together. `seconds` limits every
    collective."""
    require_gpu(device)
    transport: Transport = join(device, seconds, "auto") if is_rank() else connect(device)
    with tempfile.TemporaryDirectory() as temporary:
        # rank 0's folder, deleted after all ranks have left the block
        yield transport, Path(transport.gather_bytes(temporary.encode())[0].decode())
        transport.gather_bytes(b"")
    transport.close()


@contextmanager
def share_gpu(ranks: int) -> Iterator[dict[str, str]]:
    """Runs MPS until the end of the block. Yields the environment of its clients."""
    control = shutil.which(_CONTROL)
    if control is None:
        raise ValueError(
            f"{ranks} ranks on fewer GPUs share them through CUDA's MPS, but {_CONTROL} "
            "is not installed here"
        )
    folders = {
        name: tempfile.mkdtemp(prefix="mps-")
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    }
    environment = {**os.environ, **folders}
    pipe = folders["CUDA_MPS_PIPE_DIRECTORY"]
    try:
        # The daemon inherits open files: a pipe of ours would never close.
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        begun = subprocess.run([control, "-d"], env=environment, timeout=30, check=False, **quiet)  # type: ignore[call-overload]
        if begun.returncode:
            raise ValueError(
                f"CUDA's MPS does not start here ({_CONTROL} -d ended with status "
                f"{begun.returncode})"
            )
        answers = partial(_ask_mps, control, environment, "get_server_list")
        if not _wait_until(answers, MPS_SECONDS, "CUDA's MPS answers"):
            raise ValueError(f"CUDA's MPS does not answer within {MPS_SECONDS:.0f} s")
        yield {**folders, PART: str(100 // ranks)}
    finally:
        # Its servers end with their last client. One that is left over holds the GPU.
        _ask_mps(control, environment, "quit -t 10")
        ended = partial(_end_mps, pipe)
        if not _wait_until(ended, MPS_SECONDS, "CUDA's MPS has ended"):
            _end_mps(pipe, signal.SIGKILL)
            _wait_until(ended, 5, "CUDA's MPS has ended after SIGKILL")
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def _ask_mps(control: str, environment: Mapping[str, str], words: str) -> bool:
    """Whether the daemon has carried out a command."""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [control], env=environment, input=f"{words}\n", text=True, timeout=15,
            capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode == 0
    return False


def _end_mps(pipe: str, number: int = 0) -> bool:
    """Sends a signal to the daemon and servers of this pipe folder; whether there are none."""
    wanted, none = f"CUDA_MPS_PIPE_DIRECTORY={pipe}".encode(), True
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            command = (process / "cmdline").read_bytes()
            if not Path(command.split(b"\0")[0].decode()).name.startswith("nvidia-cuda-mps"):
                continue
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                none = False
                os.kill(int(process.name), number)
    return none


def _wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> bool:
    """Polls; says on standard error what it waits for if that takes longer than two seconds."""
    begin, shown = time.monotonic(), False
    while not is_so():
        waited = time.monotonic() - begin
        if waited > seconds:
            return False
        if waited > 2 and not shown:
            print(f"waiting at most {seconds:.0f} s until {what}", file=sys.stderr, flush=True)
            shown = True
        time.sleep(0.1)
    return True
