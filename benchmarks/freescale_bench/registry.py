"""registry.toml, and which of its benchmarks can run on this machine. all.py runs them."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from freescale_bench.common.hosts import can_open_hosts
from freescale_bench.common.repository import find_repository

_NEEDS = ("cores", "torchrec", "hosts", "gpu", "file", "wrk", "repository", "s3", "engines")


@dataclass(frozen=True)
class Benchmark:
    """An entry of registry.toml, which documents the fields."""

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
                f"benchmark {self.name} needs {', '.join(unknown)}; known needs are "
                f"{', '.join(_NEEDS)}"
            )


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that benchmarks may need."""

    cores: int
    hosts: bool  # network namespaces are possible
    gpu: str  # short name; empty without a GPU
    gpus: int
    mps: bool
    file: str | None  # from --file
    repository: bool = True  # the package is in a clone
    wrk: bool = True
    s3: bool = True  # a server and a client
    engines: bool = True  # DuckDB, Spark and Java

    @staticmethod
    def inspect(file: str | None) -> Machine:
        import torch

        from freescale_bench.common.ranks import get_gpu_name

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return Machine(
            os.cpu_count() or 1,
            can_open_hosts(),
            get_gpu_name(),
            gpus,
            shutil.which("nvidia-cuda-mps-control") is not None,
            file,
            find_repository() is not None,
            shutil.which("wrk") is not None,
            _has("s3fs", "moto"),
            _has("duckdb", "pyspark") and shutil.which("java") is not None,
        )

    @property
    def testbed(self) -> str:
        return "hosts" if self.hosts else "loopback"

    def find_lack(self, benchmark: Benchmark) -> str:
        """Returns why a benchmark cannot run here; empty if it seems possible."""
        checks: dict[str, tuple[bool, str]] = {
            "cores": (self.cores >= 2, "pins two ranks: needs two cores"),
            "hosts": (self.hosts, "sets up hosts: needs root and iproute2 (ip, tc)"),
            "gpu": (bool(self.gpu), "needs a GPU"),
            "file": (
                self.file is not None,
                "needs real histories: --file online_retail_ii.parquet",
            ),
            "wrk": (self.wrk, "sends requests: needs wrk (apt-get install wrk)"),
            "s3": (self.s3, "runs an S3 server: needs s3fs, moto[s3] and flask-cors"),
            "engines": (self.engines, "runs queries: needs duckdb, pyspark and Java"),
            "torchrec": (True, ""),  # checked during its setup
            "repository": (
                self.repository,
                "reads results in the repository: run it from a clone",
            ),
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

    def name_result(self, benchmark: Benchmark) -> str:
        """Returns the name of the result file."""
        return benchmark.result.format(gpu=self.gpu or "gpu", testbed=self.testbed)


def _has(*packages: str) -> bool:
    return all(find_spec(package) is not None for package in packages)


def read_registry() -> list[Benchmark]:
    with Path(__file__).with_name("registry.toml").open("rb") as file:
        found = [Benchmark(**entry) for entry in tomllib.load(file)["benchmark"]]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise ValueError(f"registry.toml names a benchmark twice: {', '.join(names)}")
    return found


def choose(benchmarks: Sequence[Benchmark], only: Sequence[str]) -> list[Benchmark]:
    """Returns the named benchmarks in the registry's order; all by default."""
    unknown = sorted(set(only) - {one.name for one in benchmarks})
    if unknown:
        raise ValueError(
            f"there is no benchmark {', '.join(unknown)}; there is "
            f"{', '.join(one.name for one in benchmarks)}"
        )
    return [one for one in benchmarks if not only or one.name in only]


def find_done(path: Path, commit: str, changed: float, machine: dict[str, Any]) -> str:
    """Returns the date of a result from this tree and machine, or an empty string. `changed`: when
    a file of the tree was last written, in seconds since 1970; used if the tree differs from its
    commit."""
    if commit == "unknown" or not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["commit"] != commit or result["machine"] != machine:
        return ""
    later = datetime.fromisoformat(result["date"]).timestamp() > changed
    return str(result["date"]) if later or not commit.endswith("+") else ""
