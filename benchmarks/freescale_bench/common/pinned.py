"""Runs a benchmark function on several local gloo ranks, each pinned to a core of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def run_pinned_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 3600
) -> list[Any]:
    """`function(rank, world, *args)` on each rank; what each returned, in rank order."""
    if (os.cpu_count() or 1) < world:
        raise SystemExit(
            f"{world} timed ranks need {world} cores, this machine has {os.cpu_count()}"
        )
    from freescale.launch.ranks import find_free_port

    context = multiprocessing.get_context("spawn")
    queue, port = context.Queue(), find_free_port()
    processes = [
        context.Process(target=_run_rank, args=(r, world, port, function, args, queue))
        for r in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < world:
            rank, value = queue.get(timeout=timeout)
            if isinstance(value, BaseException):
                raise SystemExit(f"rank {rank} failed: {value}")
            results[rank] = value
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world)]


def _run_rank(
    rank: int,
    world: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    queue: Any,
) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=300),
        )
        queue.put((rank, function(rank, world, *args)))
        dist.barrier()
    except BaseException as error:  # noqa: BLE001 - it is raised again by the parent
        import traceback

        traceback.print_exc(file=sys.stderr)
        queue.put((rank, RuntimeError(repr(error))))
    queue.close()
    queue.join_thread()
    os._exit(0)
