"""Ranks over hosts: network namespaces with links between them, and in each an agent of torchrun,
which starts its ranks again after a failure."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from freescale_bench.common.hosts import RATE, Network, run_ip, run_tool
from torch._C._distributed_c10d import TCPStore

from faults.forked import fork, run_command
from faults.reporter import LAUNCHER, report_to
from faults.testbed import RESTARTS, LocalTestbed, end_with_storm, kill

_PORT = 29511  # inside the namespaces
_SLOW_RATE = "20mbit"  # a tenth of RATE
_LOSS = 0.3  # of the packets that a host receives
_MEET = {  # of torchrun's rendezvous: a host that is gone is noticed within 6 s, not 15
    "join_timeout": 60,
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 6,
    "read_timeout": 30,
}


def can_lose_packets() -> bool:
    """Whether nftables are there."""
    return shutil.which("nft") is not None


class HostsTestbed(LocalTestbed):
    """As `LocalTestbed`, with an agent on each host in the place of the launcher."""

    def __init__(self, folder: Path, world: int, address: Path, network: Network) -> None:
        super().__init__(folder, [world], address)
        self._network = network
        self.launchers = [None] * len(network.names)
        self._meetings = 0  # torchrun's, which an agent that fails ends for all of them
        self._ending = False
        self._store = fork(lambda: _keep_store(network.names[0]), self.said)

    def start(self, host: int, words: Sequence[str], inherited: Callable[[], None]) -> None:
        address, logs, network = self._address, self._folder / "samples", self._network
        if not any(self.launchers):
            self._meetings, self._ending = self._meetings + 1, False
        meeting = f"storm-{self._meetings}"

        def work() -> None:
            end_with_storm()
            inherited()
            enter_network(network.names[host])
            report_to(address, logs, LAUNCHER, host)
            _run_agent(
                meeting,
                host,
                len(network.names),
                self.world // len(network.names),
                lambda: report_to(address, logs, int(os.environ["RANK"]), host),
                words,
            )

        self.launchers[host] = fork(
            work,
            self.said,
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME=network.devices[host],
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # else an agent that comes later cannot join
        )

    def note_end(self, status: int) -> None:
        """An agent that failed has closed the meeting: the others end, and all start anew."""
        if status > 0:
            self._ending = True
            for launcher in self.launchers:
                kill(launcher, signal.SIGTERM)

    def may_start(self) -> bool:
        return not self._ending or not any(self.launchers)

    def is_on(self, process: int, host: int) -> bool:
        network = os.stat(f"/run/netns/{self._network.names[host]}").st_ino
        return os.stat(f"/proc/{process}/ns/net").st_ino == network

    def close(self) -> None:
        kill(self._store)
        with suppress(ChildProcessError):  # the storm has waited for it
            os.waitpid(self._store, 0)  # the next one has the same port

    # ---- links

    def set_link(self, host: int, *, up: bool) -> None:
        run_ip(*self._of(host), "link", "set", self._network.devices[host], "up" if up else "down")

    def lose_packets(self, host: int, *, lose: bool) -> None:
        if not lose:
            self._nft(host, "delete table ip storm")
            return
        least = int(_LOSS * (1 << 31))
        self._nft(
            host,
            "add table ip storm",
            "add chain ip storm input { type filter hook input priority 0 ; }",
            f"add rule ip storm input meta random & 2147483647 < {least} drop",
        )

    def slow_link(self, host: int, *, slow: bool) -> None:
        name, device = self._network.names[host], self._network.devices[host]
        limits = ("rate", _SLOW_RATE if slow else RATE, "burst", "64kb", "latency", "50ms")
        run_ip(
            *("netns", "exec", name, "tc", "qdisc", "replace", "dev", device, "root", "tbf"),
            *limits,
        )

    def _of(self, host: int) -> tuple[str, str]:
        return "-n", self._network.names[host]

    def _nft(self, host: int, *rules: str) -> None:
        for rule in rules:
            run_tool("ip", "netns", "exec", self._network.names[host], "nft", *rule.split())


def enter_network(name: str) -> None:
    """This process moves into a network namespace, and stays there with what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(descriptor, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"the network {name} could not be entered")
    os.close(descriptor)


def _drop_connections() -> None:
    """A rank that is forked has the connections of its agent, and would keep its port from the next
    one. Their numbers stay taken."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the folder itself, and what is no socket
            kept = socket.socket(fileno=os.dup(number))
            if kept.family in (socket.AF_INET, socket.AF_INET6):
                os.dup2(nothing, number)
            kept.close()
    os.close(nothing)


class _Complete(BaseException):
    """The command has succeeded. The agent waits for what a rank's function returns."""


def _end(status: int, leave: Callable[[int], NoReturn]) -> NoReturn:
    if status:
        leave(status)
    raise _Complete


def _keep_store(name: str) -> None:
    """Keeps the store where the agents meet, apart from them: what one of them keeps is lost with
    it, and takes the others a minute to notice."""
    enter_network(name)
    store = TCPStore("0.0.0.0", _PORT, is_master=True, wait_for_workers=False)
    while os.getppid() != 1 and store is not None:
        time.sleep(1.0)


def _run_agent(
    meeting: str,
    host: int,
    hosts: int,
    ranks: int,
    begin: Callable[[], None],
    words: Sequence[str],
) -> None:
    """What torchrun does, with ranks that are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def run_rank() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the agent's handlers are inherited
            signal.signal(number, signal.SIG_DFL)
        _drop_connections()
        begin()
        leave = os._exit
        os._exit = lambda status: _end(status, leave)
        with suppress(_Complete):
            run_command(words)
        os._exit = leave

    config = LaunchConfig(
        min_nodes=hosts,
        max_nodes=hosts,
        nproc_per_node=ranks,
        run_id=meeting,
        rdzv_backend="c10d",
        rdzv_endpoint=f"10.99.0.1:{_PORT}",
        rdzv_configs={**_MEET, "is_host": False},
        local_addr=f"10.99.0.{host + 1}",
        max_restarts=RESTARTS,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, run_rank)()
