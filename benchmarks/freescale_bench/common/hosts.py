"""Hosts with a slow network on one Linux machine (testbed A): network namespaces, joined by
rate-limited links (token bucket).

    with open_hosts(2) as network:
        results = network.run(measure, workload, 20)  # measure(rank, world, workload, 20) on each

Two hosts share one link; more are joined by a bridge in its own namespace. Every host is a process
pinned to a core. Needs root and iproute2; `Loopback` needs neither. The names of the namespaces
contain the process id. They are removed at the end, also after a failure, Ctrl-C or SIGTERM.
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

RATE = "200mbit"


class Network:
    address = "10.99.0.1:29511"  # rendezvous of the ranks; each namespace has its own ports

    def __init__(self, count: int, rate: str = RATE) -> None:
        """`rate`: of every host's link, in each direction."""
        self.names = [f"fs{os.getpid()}h{place}" for place in range(count)]
        self.devices = [f"fs{os.getpid()}v{place}" for place in range(count)]
        self.rate = rate
        self._bridge = f"fs{os.getpid()}b"
        self._made: list[str] = []

    def open(self) -> None:
        pair = len(self.names) == 2
        for name in self.names if pair else [*self.names, self._bridge]:
            run_ip(f"netns add {name}")
            self._made.append(name)
            run_ip(f"-n {name} link set lo up")
        if pair:
            (one, two), (mine, other) = self.names, self.devices
            run_ip(f"link add {mine} netns {one} type veth peer {other} netns {two}")
        else:
            run_ip(f"-n {self._bridge} link add bridge type bridge")
            run_ip(f"-n {self._bridge} link set bridge up")
        for place, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
            if not pair:
                end = f"peer port{place} netns {self._bridge}"
                run_ip(f"link add {device} netns {name} type veth {end}")
                run_ip(f"-n {self._bridge} link set port{place} master bridge up")
                self._slow_down(self._bridge, f"port{place}")
            run_ip(f"-n {name} addr add 10.99.0.{place + 1}/24 dev {device}")
            run_ip(f"-n {name} link set {device} up")
            self._slow_down(name, device)

    def _slow_down(self, name: str, device: str) -> None:
        limits = f"rate {self.rate} burst 64kb latency 50ms"
        run_ip(f"netns exec {name} tc qdisc add dev {device} root tbf {limits}")

    def close(self) -> None:
        while self._made:
            subprocess.run(
                ["ip", "netns", "delete", self._made.pop()], capture_output=True, check=False
            )

    def enter(self, name: str) -> list[str]:
        """The prefix of a command that runs on a host."""
        return ["ip", "netns", "exec", name]

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 3600,
        ranks: int = 1,
    ) -> list[Any]:
        """Calls `function(rank, world, *arguments)` in `ranks` processes of every host, which have
        joined a gloo group and share the host's core. `function` must be importable.

        Returns:
            The return values, in rank order: those of the first host come first.
        """
        hosts = list(zip(self.names, self.devices, strict=True))
        world, cores = len(hosts) * ranks, _list_cores()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "call").write_bytes(pickle.dumps((function, arguments)))
            started: list[subprocess.Popen[bytes]] = []
            stack.callback(_stop, started)
            for rank in range(world):
                name, device = hosts[rank // ranks]
                core = str(cores[rank // ranks % len(cores)])
                command = [sys.executable, "-m", "freescale_bench.common.hosts", core, self.address]
                command = [*self.enter(name), *command, str(rank), str(world), str(folder)]
                own = {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
                own["PYTHONPATH"] = package_path()
                started.append(
                    subprocess.Popen(command, env=os.environ | own, start_new_session=True)
                )
            limit = time.monotonic() + timeout
            while any(process.poll() != 0 for process in started):
                if failed := [rank for rank, process in enumerate(started) if process.poll()]:
                    raise SystemExit(f"{function.__name__} failed on ranks {failed}")
                if time.monotonic() > limit:
                    raise SystemExit(f"{function.__name__} took over {timeout:.0f} s")
                time.sleep(0.2)
            return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


class Loopback(Network):
    """Ranks on this machine's loopback interface; needs no setup."""

    def __init__(self, count: int) -> None:
        from freescale.launch.ranks import find_free_port

        if len(_list_cores()) < count:
            raise SystemExit(
                f"{count} timed ranks need {count} cores, this machine has {len(_list_cores())}"
            )
        super().__init__(count)
        self.devices = ["lo"] * count
        self.address = f"127.0.0.1:{find_free_port()}"

    def enter(self, name: str) -> list[str]:
        return []


def _list_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def can_open_hosts() -> bool:
    return os.geteuid() == 0 and None not in (shutil.which("ip"), shutil.which("tc"))


@contextmanager
def open_hosts(count: int, rate: str = RATE) -> Iterator[Network]:
    if not can_open_hosts():
        raise SystemExit("separate hosts need root and iproute2 (ip, tc)")
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


def run_ip(*words: str) -> None:
    """Runs `ip` with these arguments, split at spaces."""
    run_tool("ip", *" ".join(words).split())


def _run_host(core: int, address: str, rank: int, world: int, folder: Path) -> None:
    """The process of one host."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, arguments = pickle.loads((folder / "call").read_bytes())
    meeting, limit = f"tcp://{address}", timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=limit)
    result = function(rank, world, *arguments)
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads waiting for a peer must not keep the process alive


if __name__ == "__main__":
    _run_host(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
