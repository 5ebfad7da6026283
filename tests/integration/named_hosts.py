"""Hosts on this machine that find each other by name, as those of a cluster do: network namespaces
with an interface `eth0` and an /etc/hosts of their own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from freescale_bench.common.hosts import Network, open_hosts, run_ip

INTERFACE = "eth0"


def list_programs() -> str:
    """PATH with this environment's programs, and torchrun, which may be in another one."""
    folders = [Path(sys.executable).parent, Path(torch.__file__).parents[4] / "bin"]
    return ":".join([*map(str, folders), os.environ["PATH"], "/usr/sbin"])


@contextmanager
def open_named_hosts(names: Sequence[str]) -> Iterator[Network]:
    with open_hosts(len(names), rate="1gbit") as network:
        for name, device in zip(network.names, network.devices, strict=True):
            run_ip(f"-n {name} link set {device} down")
            run_ip(f"-n {name} link set {device} name {INTERFACE} up")
        own = [Path("/etc/netns") / name for name in network.names]
        try:
            for path in own:  # `ip netns exec` mounts what is in it over /etc
                path.mkdir(parents=True)
                lines = [f"10.99.0.{place} {name}\n" for place, name in enumerate(names, 1)]
                (path / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
            yield network
        finally:
            for path in own:
                shutil.rmtree(path, ignore_errors=True)
