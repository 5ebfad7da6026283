"""benchmarks/registry.toml, and which of its benchmarks can run on this machine. Decides; runs
nothing (bench/all.py does)."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_NEEDS = ("cores", "torchrec", "hosts", "gpu", "file")


@dataclass(frozen=True)
class Benchmark:
    """An entry of the registry; its comment says what the fields mean."""

    name: str
    command: str
    result: str
    needs: Sequence[str]
    minutes: float
    ranks: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.needs) - set(_NEEDS))
        if unknown:
            raise ValueError(
                f"benchmark {self.name} needs {', '.join(unknown)}; what can be "
                f"needed is {', '.join(_NEEDS)}"
            )


@dataclass(frozen=True)
class Machine:
    """What benchmarks may need of a machine."""

    cores: int
    hosts: bool  # network namespaces can be made
    gpu: str  # its short name, empty without one
    gpus: int
    mps: bool
    file: str | None  # of --file

    @staticmethod
    def here(file: str | None) -> Machine:
        import torch

        from freescale.ledger.machine import get_gpu_name

        hosts = (
            os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
        )
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return Machine(
            os.cpu_count() or 1,
            hosts,
            get_gpu_name(),
            gpus,
            shutil.which("nvidia-cuda-mps-control") is not None,
            file,
        )

    @property
    def testbed(self) -> str:
        return "hosts" if self.hosts else "loopback"

    def lacks(self, benchmark: Benchmark) -> str:
        """Why it cannot run here; empty if it can, as far as one sees without trying."""
        checks: dict[str, tuple[bool, str]] = {
            "cores": (self.cores >= 2, "times two pinned ranks: it needs two cores"),
            "hosts": (self.hosts, "makes hosts of its own: it needs root and iproute2 (ip, tc)"),
            "gpu": (bool(self.gpu), "needs a GPU"),
            "file": (
                self.file is not None,
                ("needs real histories: --file online_retail_ii.parquet"),
            ),
            "torchrec": (True, ""),  # seen when it is set up
        }
        missing = next(
            (why for need in benchmark.needs for met, why in (checks[need],) if not met), ""
        )
        if not missing and benchmark.ranks > self.gpus and benchmark.ranks and not self.mps:
            return (
                f"{benchmark.ranks} ranks on {self.gpus} GPUs need CUDA's MPS "
                "(nvidia-cuda-mps-control)"
            )
        return missing

    def result_of(self, benchmark: Benchmark) -> str:
        """The file's name."""
        return benchmark.result.format(gpu=self.gpu or "gpu", testbed=self.testbed)


def read_registry(root: Path) -> list[Benchmark]:
    with (root / "benchmarks" / "registry.toml").open("rb") as file:
        found = [Benchmark(**entry) for entry in tomllib.load(file)["benchmark"]]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise ValueError(f"benchmarks/registry.toml names a benchmark twice: {', '.join(names)}")
    return found


def chosen(benchmarks: Sequence[Benchmark], only: Sequence[str]) -> list[Benchmark]:
    """Those named, in the registry's order; all if none is."""
    unknown = sorted(set(only) - {one.name for one in benchmarks})
    if unknown:
        raise ValueError(
            f"there is no benchmark {', '.join(unknown)}; there is "
            f"{', '.join(one.name for one in benchmarks)}"
        )
    return [one for one in benchmarks if not only or one.name in only]


def done_before(path: Path, commit: str, changed: float, machine: dict) -> str:
    """The date of a result that this tree made on this machine, or empty. `changed`: when a file of
    the tree was last written, in seconds since 1970; it counts where the tree differs from its
    commit."""
    if commit == "unknown" or not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["commit"] != commit or result["machine"] != machine:
        return ""
    later = datetime.fromisoformat(result["date"]).timestamp() > changed
    return result["date"] if later or not commit.endswith("+") else ""
