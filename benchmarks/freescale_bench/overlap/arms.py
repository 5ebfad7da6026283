"""Shared parts of `freescale bench overlap`: the arms, which run AllToAlls on a lane's thread and
stream, and times merged over ranks.

Only one NCCL group is in use at a time, and the device is idle before another starts. Otherwise
kernels of different groups would wait for each other, in any order.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.ledger.ledger import Ledger
from freescale.pipeline.lane import Lane
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.process_group import ProcessGroupTransport
from freescale_bench.common.ranks import gather_json
from freescale_bench.common.results import spread
from freescale_bench.common.turns import wait_idle

SECONDS = 60.0  # limit of a collective
# Sizes are bytes of a rank's tensor, including its own part. cpu: only to try the code.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "message": 32 << 20, "each": 128 << 20, "pairs": 24, "channels": (1, 2, 4, 8, None),
        "product": 4096, "products": 40, "tokens": 32_768, "lengths": (1024, 4096, 16_384),
        "widths": (256, 512, 1024), "head": 128, "measured_ms": 30.0,
    },
    "cpu": {
        "message": 64 << 10, "each": 1 << 20, "pairs": 3, "channels": (None,),
        "product": 64, "products": 4, "tokens": 64, "lengths": (16, 32),
        "widths": (32,), "head": 16, "measured_ms": 2.0,
    },
}  # fmt: skip

Wait = Callable[[bool], Tensor]  # returns the result of an AllToAll, like Handle.wait


def make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Arm:
    """`begin(tensor, send, receive)` starts an AllToAll on the thread and stream of `lane`.
    `flight`: the number of messages in flight."""

    name: str
    lane: Lane
    begin: Callable[[Tensor, Sequence[int], Sequence[int]], Wait]
    flight: int
    transport: HostwireTransport | None = None  # the lane uses a channel of it


class Bed:
    """A rank's device, transports and rows. Every method except `add` is a collective."""

    def __init__(self, collective: ProcessGroupTransport, began: float) -> None:
        self.collective, self.device, self.began = collective, collective.device, began
        self.rank = collective.rank
        self.world = collective.world
        self.cuda = collective.device.type == "cuda"
        self.size, self.rows = SIZES[collective.device.type], list[dict[str, Any]]()
        self.hostwire = self._wired()
        self.message = self.even(self.size["message"])
        # an empty stream
        self.elsewhere = make_stream(self.device) if self.cuda else None
        self._groups: dict[int | None, dist.ProcessGroup] = {}
        self._message_ms: dict[str, float] = {}

    def _wired(self) -> Arm:
        groups, limit = (self.collective.group, self.collective.control), timedelta(seconds=SECONDS)
        transport = HostwireTransport(self.device, Ledger(self.device), *groups, timeout=limit)
        lane = Lane("hostwire", transport)

        def begin(tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Wait:
            return lane.transport.all_to_all(tensor, send, receive, "rows").wait

        return Arm("hostwire", lane, begin, transport.lines, transport)

    def plain(self, channels: int | None = None) -> Arm:
        """NCCL with at most `channels` channels (blocks of its kernel, each on its own
        multiprocessor). On a CPU gloo."""
        group = self._group(channels)

        def begin(tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Wait:
            output = tensor.new_empty(sum(receive))
            dist.all_to_all_single(output, tensor, list(receive), list(send), group=group)

            def wait(host: bool) -> Tensor:
                if host and self.cuda:
                    torch.cuda.current_stream().synchronize()
                return output

            return wait

        limit = (
            ""
            if channels is None
            else (f", at most {channels} channel{'s' if channels > 1 else ''}")
        )
        return Arm(f"{'nccl' if self.cuda else 'gloo'}{limit}", self.hostwire.lane, begin, 1)

    def _group(self, channels: int | None) -> dist.ProcessGroup:
        if channels not in self._groups:
            options, limit = None, timedelta(seconds=SECONDS)
            if self.cuda and channels is not None:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit  # torch warns if it differs from `timeout` below
                options.config.min_ctas, options.config.max_ctas = 1, channels
            self._groups[channels] = dist.new_group(
                timeout=limit, backend="nccl" if self.cuda else "gloo", pg_options=options
            )
        return self._groups[channels]

    def even(self, size: int) -> tuple[Tensor, list[int]]:
        """Returns a tensor of about `size` bytes, and the bytes for each rank."""
        part = max(1, size // self.world)
        return torch.zeros(part * self.world, dtype=torch.uint8, device=self.device), [
            part
        ] * self.world

    # ---- synchronization

    def barrier(self) -> None:
        self.collective.gather_bytes(b"")

    def gathered(self, value: Any) -> list[Any]:
        """Gathers the values of all ranks, in rank order."""
        return gather_json(self.collective, value)

    def idle(self) -> None:
        """Waits until the device is idle."""
        wait_idle(self.device)

    # ---- messages

    def in_lane(self, arm: Arm, function: Callable[[], None]) -> None:
        # a job starts after the submitter's work on the current stream: none, here
        with torch.cuda.stream(self.elsewhere):
            job = arm.lane.submit(function)
        job.wait(host=True)
        arm.lane.side.take()  # discards ledger entries
        self.idle()

    def message_ms(self, arm: Arm) -> float:
        """Milliseconds per `message` in a stream of them on the slowest rank, without concurrent
        compute. Measured once; the same on all ranks."""
        if arm.name not in self._message_ms:
            tensor, send = self.message
            count = max(2, min(16, self.size["each"] // self.size["message"]))
            times: list[float] = []

            def measure() -> None:
                for _ in range(4):  # the first opens connections and allocates memory
                    self.barrier()
                    begin = time.perf_counter()
                    send_stream(arm, tensor, send, count, arm.flight, host=arm.flight == 1)
                    times.append(1e3 * (time.perf_counter() - begin) / count)

            self.in_lane(arm, measure)
            slowest = [max(ranks) for ranks in zip(*self.gathered(times[1:]), strict=True)]
            self._message_ms[arm.name] = median(slowest)
        return self._message_ms[arm.name]

    # ---- results

    def add(self, group: str, case: str, arm: str, **more: Any) -> dict[str, Any]:
        """Adds a row and prints it. Lists of milliseconds are replaced by their spread."""
        if isinstance(more.get("ms"), list):
            more["ms"] = spread(more["ms"])
        row = {"group": group, "case": case, "arm": arm, **more}
        self.rows.append(row)
        self.say(
            f"{case}, {arm}: "
            + (f"{row['ms']['median']:.3f} ms" if "ms" in row else f"skipped, {row['skipped']}")
        )
        return row

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.perf_counter() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Closes hostwire. NCCL's groups end with the process: ranks on one GPU would wait for each
        other while destroying them."""
        self.barrier()
        self.hostwire.lane.close()
        if self.hostwire.transport is not None:
            self.hostwire.transport.close()


def send_stream(
    arm: Arm, tensor: Tensor, send: Sequence[int], count: int, flight: int, host: bool
) -> None:
    """Runs `count` AllToAlls of the same tensor, `flight` at a time, and waits for the last.
    `host`: the host also waits for each before it starts another. Runs on the lane's thread."""
    under_way: deque[Wait] = deque()
    for _ in range(count):
        if len(under_way) >= flight:
            under_way.popleft()(host)
        under_way.append(arm.begin(tensor, send, send))
    while under_way:
        under_way.popleft()(True)


def count_leaving(size: int, world: int) -> int:
    """Bytes of a rank's tensor that go to other ranks."""
    return max(1, size // world) * (world - 1)


def to_gigabytes(size: float, milliseconds: float) -> float:
    """GB/s."""
    return size / milliseconds / 1e6


def format_size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
