"""A Slurm cluster on this machine: Debian's munged, slurmctld and a slurmd for each node. Nodes are
network namespaces with an address and a name each; the last one is the controller's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from freescale_bench.common.hosts import Network

from integration.named_hosts import list_programs, open_named_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
_CONTROLLER = "controller"
_GONE = 10  # seconds of silence after which a node is lost


def find_missing() -> list[str]:
    """Programs that the cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass
class Cluster:
    """Its nodes, which fail and return, and its jobs."""

    folder: Path
    network: Network
    nodes: list[str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={self.folder}/munge", f"--pid-file={self.folder}/munge.pid",
            f"--seed-file={self.folder}/munge.seed", f"--log-file={self.folder}/munge.log",
        )  # fmt: skip
        _wait((self.folder / "munge").exists, 30)
        self._start_named(_CONTROLLER, "slurmctld -D -i")
        for node in self.nodes:
            self.start_node(node)
        _wait(lambda: self.count_idle() == len(self.nodes), 60)

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start_named(node, f"slurmd -D -N {node}")

    def kill_node(self, node: str) -> None:
        """The power of a node fails: slurmd is gone, and so is everything that runs there."""
        for process in self.list_processes(node):
            with suppress_gone():
                os.kill(process, signal.SIGKILL)
        self.daemons.pop(node).wait()

    def list_processes(self, node: str) -> list[int]:
        found = os.stat(f"/run/netns/{self._name(node)}").st_ino
        processes = []
        for path in Path("/proc").iterdir():
            with suppress_gone():
                if path.name.isdigit() and os.stat(path / "ns" / "net").st_ino == found:
                    processes.append(int(path.name))
        return processes

    def enter(self, node: str) -> list[str]:
        return self.network.enter(self._name(node))

    def _name(self, node: str) -> str:
        return self.network.names[[*self.nodes, _CONTROLLER].index(node)]

    def call(self, *words: object, **environment: str) -> str:
        """A command of Slurm's on the controller."""
        command = [*self.enter(_CONTROLLER), *map(str, words)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60,
            env={**self._environment(), **environment},
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.read_logs()}"
        return done.stdout.strip()

    def count_idle(self) -> int:
        command = [*self.enter(_CONTROLLER), "sinfo", "-h", "-t", "idle", "-o", "%D"]
        told = subprocess.run(command, capture_output=True, text=True, env=self._environment())
        return sum(map(int, told.stdout.split()))

    def find_state(self, job: str) -> dict[str, str]:
        """What scontrol says of a job."""
        words = self.call("scontrol", "show", "job", job, "-o").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def read_logs(self) -> str:
        parts = (path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log"))
        return "\n".join(parts)

    def close(self) -> None:
        for node in [*self.nodes, _CONTROLLER]:
            for process in self.list_processes(node):
                with suppress_gone():
                    os.kill(process, signal.SIGKILL)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.daemons[name] = subprocess.Popen(
            command, stdout=log, stderr=log, env=self._environment()
        )

    def _start_named(self, node: str, command: str) -> None:
        """On a host that has the node's name."""
        words = ["unshare", "--uts", "sh", "-c", f"hostname {node} && exec {command}"]
        self._start(node, *self.enter(node), *words)

    def _environment(self) -> dict[str, str]:
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": list_programs()}
        return {**os.environ, **own}


@contextmanager
def open_cluster(folder: Path, count: int) -> Iterator[Cluster]:
    """A cluster of `count` nodes with two processors and eight pretended GPUs each."""
    nodes = [f"node{place}" for place in range(1, count + 1)]
    with open_named_hosts([*nodes, _CONTROLLER]) as network:
        for file, text in _configure(folder, nodes).items():
            (folder / file).write_text(text)
        for number in range(8):  # Slurm looks whether they exist
            (folder / f"gpu{number}").touch()
        cluster = Cluster(folder, network, nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


def _configure(folder: Path, nodes: list[str]) -> dict[str, str]:
    settings = {
        "ClusterName": "freescale",
        "SlurmctldHost": f"{_CONTROLLER}(10.99.0.{len(nodes) + 1})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge,cred_expire=5",  # else a lost job waits 2 minutes
        "CredType": "cred/munge",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool-%n",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "GresTypes": "gpu",
        "SlurmdTimeout": _GONE,
        "SlurmctldTimeout": 30,
        "MessageTimeout": 10,
        "ReturnToService": 2,
        "KillWait": 60,
        "MinJobAge": 3600,
    }
    addresses = "".join(
        f"NodeName={name} NodeAddr=10.99.0.{place} CPUs=2 RealMemory=2000 Gres=gpu:8\n"
        for place, name in enumerate(nodes, 1)
    )
    partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    lines = [f"{name}={value}\n" for name, value in settings.items()]
    gres = "".join(f"NodeName={name} Name=gpu File={folder}/gpu[0-7]\n" for name in nodes)
    return {
        "slurm.conf": "".join([*lines, addresses, partition]),
        "gres.conf": gres,
        "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
    }


@contextmanager
def suppress_gone() -> Iterator[None]:
    """A process may end while it is looked at."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        yield


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come in {seconds:.0f} s"
        time.sleep(0.2)
