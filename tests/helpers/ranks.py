"""Runs a function on several gloo ranks and returns what each returned. Nothing hangs: every wait
has an end."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# With what test modules import, which every rank would otherwise import for itself.
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "freescale.train.trainer",
        "freescale.train.state.checkpoints",
        "pytest",
        "hypothesis.strategies",
    ]
)


def run_ranks(world: int, function: Callable, *args: Any, timeout: float = 240) -> list[Any]:
    """`function(transport, *args)` on `world` ranks, a process each (one too: it has a process
    group then). Errors are raised here, all of them: most ranks only say that another is gone."""
    results = gather_ranks(world, function, *args, timeout=timeout)
    errors = [
        f"rank {rank} of {world} failed:\n{error}"
        for rank, (error, _) in enumerate(results)
        if error is not None
    ]
    if errors:
        raise AssertionError("\n".join(errors))
    return [value for _, value in results]


def gather_ranks(
    world: int, function: Callable, *args: Any, timeout: float = 240, lost: Sequence[int] = ()
) -> list[tuple[str | None, Any]]:
    """(error or None, result) of each rank; of those that are `lost`, which die in the function,
    ("lost", None)."""
    with tempfile.TemporaryDirectory() as folder:
        queue = CONTEXT.Queue()
        store = str(Path(folder) / "store")
        processes = [
            CONTEXT.Process(
                target=_rank, args=(rank, world, store, function, args, queue, timeout), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        results: dict[int, tuple[str | None, Any]] = {rank: ("lost", None) for rank in lost}
        try:
            for _ in range(world - len(lost)):
                rank, error, value = queue.get(timeout=timeout)
                results[rank] = (
                    error,
                    None if value is None else torch.load(io.BytesIO(value), weights_only=False),
                )
            for rank in lost:
                processes[rank].join(timeout=timeout)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
        return [results[rank] for rank in range(world)]


def _packed(value: Any) -> bytes:
    """By value: tensors in a queue would travel as handles that die with their process."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _rank(
    rank: int, world: int, store: str, function: Callable, args: tuple, queue: Any, timeout: float
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from freescale.transport.connect import connect

    torch.set_num_threads(1)
    # Every schedule that a test runs collects garbage first, over all that torch and the others
    # imported: 0.2 s, hundreds of times.
    gc.freeze()
    gc.unfreeze = lambda: None
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout / 2),
        )
        value = function(connect("cpu", transport="collective"), *args)
        queue.put((rank, None, _packed(value)))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)
