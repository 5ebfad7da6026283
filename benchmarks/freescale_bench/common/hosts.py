"""Hosts with a slow network on one Linux machine (testbed A): network namespaces, joined by links
that a token bucket slows down.

    with open_hosts(2) as network:
        results = network.run(measure, workload, 20)  # measure(rank, world, workload, 20) on each

Two hosts share one link, more hang on a bridge in a namespace of its own. Every host is a process
pinned to a core. Needs root and iproute2. The namespaces bear the name of this process and are
removed at the end, also after a failure, Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from freescale_bench.common.repository import package_path

_PORT = 29511  # inside the namespaces, which have ports of their own
RATE = "200mbit"


class Network:
    def __init__(self, count: int, rate: str = RATE) -> None:
        """`rate`: of every host's link, each way."""
        self.names = [f"fs{os.getpid()}h{place}" for place in range(count)]
        self.devices = [f"fs{os.getpid()}v{place}" for place in range(count)]
        self.rate = rate
        self._bridge = f"fs{os.getpid()}b"
        self._made: list[str] = []

    def open(self) -> None:
        for name in self.names if len(self.names) == 2 else [*self.names, self._bridge]:
            run_ip("netns", "add", name)
            self._made.append(name)
            run_ip("-n", name, "link", "set", "lo", "up")
        if len(self.names) == 2:
            run_ip(
                "link",
                "add",
                self.devices[0],
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                self.devices[1],
                "netns",
                self.names[1],
            )
        else:
            run_ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            run_ip("-n", self._bridge, "link", "set", "bridge", "up")
        for place, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
            if len(self.names) != 2:
                run_ip(
                    "link",
                    "add",
                    device,
                    "netns",
                    name,
                    "type",
                    "veth",
                    "peer",
                    f"port{place}",
                    "netns",
                    self._bridge,
                )
                run_ip("-n", self._bridge, "link", "set", f"port{place}", "master", "bridge", "up")
                self._slow_down(self._bridge, f"port{place}")
            run_ip("-n", name, "addr", "add", f"10.99.0.{place + 1}/24", "dev", device)
            run_ip("-n", name, "link", "set", device, "up")
            self._slow_down(name, device)

    def _slow_down(self, name: str, device: str) -> None:
        limits = ("rate", self.rate, "burst", "64kb", "latency", "50ms")
        run_tool(
            "ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limits
        )

    def close(self) -> None:
        while self._made:
            subprocess.run(
                ["ip", "netns", "delete", self._made.pop()], capture_output=True, check=False
            )

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 1800
    ) -> list[Any]:
        """Calls `function(rank, world, *arguments)` on every host, in a process of its own that has
        joined a gloo group. `function` is one of an importable module.

        Returns:
            What it returned on each host, in rank order.
        """
        world, cores = len(self.names), sorted(os.sched_getaffinity(0))
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "call").write_bytes(pickle.dumps((function, arguments)))
            started: list[subprocess.Popen[bytes]] = []
            stack.callback(_stop, started)
            for rank, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
                core = str(cores[rank % len(cores)])
                command = [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    "taskset",
                    "-c",
                    core,
                    sys.executable,
                    "-m",
                    "freescale_bench.common.hosts",
                ]
                told = {
                    "GLOO_SOCKET_IFNAME": device,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": package_path(),
                }
                command += [str(rank), str(world), str(folder)]
                started.append(
                    subprocess.Popen(command, env=os.environ | told, start_new_session=True)
                )
            limit = time.monotonic() + timeout
            while any(process.poll() is None for process in started):
                failed = [rank for rank, process in enumerate(started) if process.poll()]
                if failed or time.monotonic() > limit:
                    raise SystemExit(
                        f"{function.__name__} failed on host {failed}"
                        if failed
                        else f"{function.__name__} took over {timeout:.0f} s"
                    )
                time.sleep(0.2)
            if any(process.returncode for process in started):
                raise SystemExit(
                    f"{function.__name__} failed on hosts "
                    f"{[rank for rank, process in enumerate(started) if process.returncode]}"
                )
            return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


@contextmanager
def open_hosts(count: int, rate: str = RATE) -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("hosts of their own need root and iproute2 (ip, tc)")
    network = Network(count, rate)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        network.open()
        yield network
    finally:
        network.close()
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _stop(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def run_ip(*arguments: str) -> None:
    run_tool("ip", *arguments)


def _run_host(rank: int, world: int, folder: Path) -> None:
    """The process of one host."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, arguments = pickle.loads((folder / "call").read_bytes())
    meeting = f"tcp://10.99.0.1:{_PORT}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    result = function(rank, world, *arguments)
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads that wait for a peer must not keep it


if __name__ == "__main__":
    _run_host(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
