"""Exact search for many users: the library's tiles against torch's matmul and topk over the same
vectors. The arms take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.best_items import find_best
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Row, at_least, spread, write

ITEMS, WIDTH, K = 1_000_000, 64, 100
USERS = {"cpu": 512, "cuda": 1 << 17}  # of a turn
GROUPS = {"cpu": (32, 64, 256), "cuda": (256, 1024, 2048)}  # users of one product, of the baseline
LEAST_GAIN, LEAST_USERS = 3.0, 50_000.0  # targets: times torch on a CPU, users/s on an H200


def search(queries: Tensor, items: Tensor, k: int) -> Tensor:
    """Places [users, k], on the host."""
    return find_best(queries, items, k)[1].cpu()


def search_in_torch(queries: Tensor, items: Tensor, k: int, group: int) -> Tensor:
    parts = [(part @ items.T).topk(k, dim=1).indices for part in torch.split(queries, group)]
    return torch.cat(parts).cpu()


def bench_batch(device: str, turns: int, threads: int, trial: bool, to: Destination) -> None:
    require_gpu(device)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    users, count = (USERS[device], ITEMS) if not trial else (32, 5000)
    items = F.normalize(torch.randn(count, WIDTH), dim=1).to(device)
    queries = F.normalize(torch.randn(users, WIDTH), dim=1).to(device)
    arms: dict[str, Callable[[], Tensor]] = {"tiles": lambda: search(queries, items, K)}
    for group in GROUPS[device]:
        arms[f"torch, {group} users at a time"] = (
            lambda group=group: search_in_torch(queries, items, K, group)  # type: ignore[misc]
        )
    found = {name: arm() for name, arm in arms.items()}  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(turns):
        for name, arm in arms.items():
            begin = time.perf_counter()
            arm()
            seconds[name].append(time.perf_counter() - begin)
    rows: list[Row] = [
        {
            "arm": name,
            "users": users,
            "turn_s": spread(times),
            "users_per_second": users / spread(times)["median"],
            "different_places": int((found[name] != found["tiles"]).sum()),
        }
        for name, times in seconds.items()
    ]
    for row in rows:
        print(row, flush=True)
    if trial:
        return
    own, *others = (float(row["users_per_second"]) for row in rows)
    if device == "cuda":
        claims = [at_least("users/s, exact", LEAST_USERS, own, "users/s")]
    else:
        claims = [at_least("users/s, times torch's", LEAST_GAIN, own / max(others), "times")]
    command = f"freescale bench recommend batch --device {device} --turns {turns}"
    command += f" --threads {threads}" if device == "cpu" else ""
    testbed = get_gpu_name() if device == "cuda" else "cpu"
    sizes = {"items": count, "width": WIDTH, "k": K}
    write("recommend-batch", testbed, command, rows, claims, [], to=to, model=sizes)
