"""A table on a disk, three times as large as the memory that a cgroup allows the process, beside
the same table in memory: samples a second on a CPU.

The limit counts what the process allocates and the pages of its mapped file; the kernel writes
pages of the file back when there is no room. Each arm is a process of its own, which joins the
group before it imports anything large.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freescale.embedding.host_tables.tiers import Disk, parse_bytes
from freescale_bench.common.repository import package_path
from freescale_bench.common.results import Asked, Destination, Row, make_claims, show_claims, write

ARMS = ("memory", "disk")
FACTOR = 3  # size of the table over the limit
WARMUP = 20
SECONDS = 600.0  # of an arm

ASKED = [
    Asked("table over limit", "bytes of the table over those that the process may have", FACTOR,
          "x"),
    Asked("steps", "steps that the table on the disk was trained for", 1, ""),
]  # fmt: skip


@dataclass(frozen=True)
class Limited:
    limit: str  # of memory
    folder: str  # on the disk
    steps: int  # that are timed

    @property
    def size(self) -> int:
        """Bytes of rows and state."""
        return FACTOR * parse_bytes(self.limit)

    def make_workload(self) -> Any:
        from freescale_bench.common.workload import Workload

        width = 64
        return Workload(
            rows=-(-self.size // (2 * 4 * width)),  # Adagrad has a sum for each number
            width=width,
            samples=64,
            median_length=50.0,
            sigma=0.0,
            maximum_length=50,
            popularity="unique log",
            hidden=(256,),
            steps=100,
        )

    def as_arguments(self) -> list[str]:
        """The command line of this benchmark."""
        return ["cgroup", "--limit", self.limit, "--disk", self.folder, "--steps", str(self.steps)]


@contextmanager
def open_group(limit: int) -> Iterator[Path]:
    """A memory cgroup below that of this process, with a limit. Processes join by writing their
    number to its cgroup.procs; it goes when the block is left.

    Raises:
        ValueError: this machine does not let this process make one.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {name: path for _, names, path in lines for name in names.split(",")}
    mount, name = Path("/sys/fs/cgroup"), "memory.max"
    if "memory" in own:
        mount, name = mount / "memory", "memory.limit_in_bytes"
    parent = mount / own.get("memory", own.get("", "/")).lstrip("/")
    group = parent / f"freescale-bench-{os.getpid()}"
    try:
        if name == "memory.max" and "memory" not in _read(parent / "cgroup.subtree_control"):
            (parent / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        raise ValueError(
            f"a memory cgroup cannot be made in {parent} ({error.strerror}): run this as root, on "
            "cgroup v2 in a group without processes of its own (systemd-run --scope)"
        ) from None
    try:
        (group / name).write_text(str(limit))
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def measure_arm(name: str, limited: Limited) -> Row:
    """The row of an arm, in a process of its own."""
    import torch

    from freescale_bench.common import arm as ours
    from freescale_bench.host_tables.timed import time_arm

    torch.set_num_threads(1)
    workload = limited.make_workload()
    tier = Disk(limited.folder, parse_bytes(limited.limit) // 64)

    def build() -> Any:
        placement = tier if name == "disk" else "sharded"
        arm = ours.build(
            workload, 0, 1, "staged", transport="local", placement=placement, own_rows=True
        )
        return arm.begin_step, arm.ledger

    row = time_arm(build, workload.samples, WARMUP, limited.steps, "cpu")
    return {"arm": name, "table_bytes": workload.rows * workload.width * 8, **row}


def bench_limited(limited: Limited, keep: bool, to: Destination) -> int:
    """Starts the arms one after another. Returns the exit status."""
    rows: list[Row] = []
    limit = parse_bytes(limited.limit)
    with tempfile.TemporaryDirectory() as folder, open_group(limit) as group:
        for name in ARMS:
            output = Path(folder) / f"{name}.json"
            words = [*limited.as_arguments(), "--arm", name, "--output", str(output)]
            words += ["--join", str(group)] if name == "disk" else []
            command = [sys.executable, "-m", "freescale_bench.host_tables", *words]
            environment = {**os.environ, "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, timeout=SECONDS, check=False)
            if done.returncode:
                raise ValueError(
                    f"the arm {name!r} ended with status {done.returncode}; -9: the process needs "
                    "more than --limit for itself"
                )
            rows.append(json.loads(output.read_text(encoding="utf-8")))
            if name == "disk":
                rows[-1] |= _read_use(group, limit)
            shown = {key: value for key, value in rows[-1].items() if key != "losses"}
            print(json.dumps(shown), flush=True)
    memory, disk = rows
    assert memory["losses"] == disk["losses"], "the same bits in both places"
    rates = [row["samples_per_second"]["median"] for row in rows]
    figures = {
        "table over limit": disk["table_bytes"] / limit,
        "steps": float(len(disk["losses"])),
        "share of the samples/s in memory": rates[1] / rates[0],
    }
    print(json.dumps(figures))
    claims = make_claims(ASKED, figures)
    if not keep:
        show_claims(claims)
        return 0
    command = ["freescale", "bench", "host_tables", *limited.as_arguments()]
    about: dict[str, Any] = {"figures": figures, "shape": asdict(limited.make_workload())}
    write("host_tables-cgroup", "cpu", " ".join(command), rows, claims, to=to, **about)
    return 0


def _read_use(group: Path, limit: int) -> Row:
    """What the group had at most."""
    peak = _read(group / "memory.max_usage_in_bytes") or _read(group / "memory.peak")
    return {"limit_bytes": limit, "peak_of_group_bytes": int(peak or 0)}
