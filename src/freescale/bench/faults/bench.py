"""Storms of faults, one after another, and what they leave."""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freescale.bench.common.hosts import Network, open_hosts
from freescale.bench.common.results import Claim, Destination, claim, write
from freescale.bench.faults.forked import preload
from freescale.bench.faults.hosts_testbed import HostsTestbed, can_lose_packets
from freescale.bench.faults.plan import KINDS, Fault, count_steps, plan_faults
from freescale.bench.faults.proof import compare_logs, compare_states, read_final_state, read_log
from freescale.bench.faults.setting import Setting, choose_setting, make_command, make_data
from freescale.bench.faults.storm import Storm
from freescale.bench.faults.strikes import Strikes
from freescale.bench.faults.testbed import LocalTestbed, adopt_orphans, mount_disk

_LIMIT = 120.0  # seconds without a step, after which a run has hung


@dataclass(frozen=True)
class Options:
    """Of the benchmark."""

    work: Path
    storms: int
    faults: int
    seed: int
    worlds: Sequence[int]
    hosts: int
    timeout: float


def list_kinds(disk: bool, hosts: int, snapshots: bool) -> list[str]:
    """The kinds of faults that can happen here, to runs with a disk of their own or without."""
    there = {""} | ({"disk"} if disk else set()) | ({"snapshots"} if snapshots else set())
    if hosts > 1:
        there |= {"hosts"} | ({"packets"} if can_lose_packets() else set())
    return [name for name, kind in KINDS.items() if kind.needs in there]


def bench_faults(options: Options, to: Destination) -> int:
    """Makes the storms that the work folder does not have yet. Returns 1 if a run differs from the
    undisturbed one."""
    preload()
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    disk = mount_disk(work / "disk.img", work / "disk")
    if not disk:
        print("disks are not full here: to mount one takes root and mkfs.ext4", flush=True)
    rows = []
    with open_hosts(options.hosts) if options.hosts > 1 else nullcontext() as network:
        for seed in range(options.seed, options.seed + options.storms):
            setting = choose_setting(seed, options.worlds, options.hosts, options.timeout)
            kinds = list_kinds(disk, options.hosts, setting.snapshot_every > 0)
            rows.append(run_storm(work, seed, options.faults, setting, kinds, network))
    words = f"--storms {options.storms} --faults {options.faults} --seed {options.seed}"
    ranks = ",".join(map(str, options.worlds))
    words += f" --timeout {options.timeout:g}"
    words += f" --ranks {ranks}" + (f" --hosts {options.hosts}" if options.hosts > 1 else "")
    claims = make_claims(rows)
    testbed = "hosts" if options.hosts > 1 else "cpu"
    struck = {event["kind"] for row in rows for event in row["events"]}
    about = {name: kind.about for name, kind in KINDS.items() if name in struck}
    command = f"freescale bench faults {words}"
    write("faults", testbed, command, rows, claims, to=to, kinds=about)
    return int(not all(_is_exact(row) for row in rows))


def run_storm(
    work: Path,
    seed: int,
    number: int,
    setting: Setting,
    kinds: Sequence[str],
    network: Network | None = None,
) -> dict[str, Any]:
    """A storm, and the undisturbed run beside it. Returns the row of the result, which stays in
    the work folder: the storm is not made again."""
    folder, disk = work / f"storm-{seed}", work / "disk" / f"storm-{seed}"
    if (folder / "row.json").exists():
        found: dict[str, Any] = json.loads((folder / "row.json").read_text(encoding="utf-8"))
        return found
    for path in (folder, disk):
        path.mkdir(parents=True, exist_ok=True)
    if not (folder / "events.parquet").exists():
        make_data(folder / "events.parquet")
    faults = plan_faults(seed, number, setting.world, kinds)
    print(f"storm {seed}: {setting.describe()}, {count_steps(faults)} steps", flush=True)
    calm = _run(folder, disk, "calm", [], count_steps(faults), setting, network)
    storm = _run(folder, disk, "storm", faults, count_steps(faults), setting, network)
    row = _describe(folder, disk, seed, setting, storm, calm)
    (folder / "row.json").write_text(json.dumps(row), encoding="utf-8")
    shutil.rmtree(disk)
    return row


def _run(
    folder: Path,
    disk: Path,
    name: str,
    faults: Sequence[Fault],
    steps: int,
    setting: Setting,
    network: Network | None,
) -> Storm:
    """A run, unless it is complete already; one that was interrupted goes on."""
    run, cache, own = disk / name, disk / "cache", folder / name
    own.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="fs-faults-"))  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "storm"))
        listener.listen(64)
        address = place / "storm"
        storm = Storm(
            LocalTestbed(own, setting.world, address)
            if network is None
            else HostsTestbed(own, setting.world, address, network),
            make_command(folder / "events.parquet", cache, run, steps, setting),
            faults,
            Strikes(run, cache, setting.timeout),
            own / "state.json",
            listener,
            _LIMIT if network is None else 2 * _LIMIT,  # torchrun takes longer to notice a loss
        )
        try:
            if not (own / "complete").exists():
                storm.run()
                (own / "complete").touch()
        finally:
            storm.testbed.close()
            shutil.rmtree(place)
    return storm


def _describe(
    folder: Path, disk: Path, seed: int, setting: Setting, storm: Storm, calm: Storm
) -> dict[str, Any]:
    names = ("storm", "calm")
    logs = [read_log(folder / name / "samples") for name in names]
    states = [read_final_state(disk / name, folder / name / "output.txt") for name in names]
    events = storm.events
    by_kind: dict[str, list[float]] = {}
    for event in events:
        by_kind.setdefault(event["kind"], []).append(event["lasted_s"])
    return {
        "seed": seed,
        **asdict(setting),
        "faults": len(events),
        "ended_without_a_fault": storm.unplanned,
        "seconds": round(storm.wall, 1),
        "undisturbed_seconds": round(calm.wall, 1),
        "seconds_per_fault": round((storm.wall - calm.wall) / max(1, len(events)), 3),
        "seconds_by_kind": {
            kind: {
                "count": len(lasted),
                "median": statistics.median(lasted),
                "max": max(lasted),
            }
            for kind, lasted in sorted(by_kind.items())
        },
        "moments": sorted({event["struck_at"] for event in events if event["moment"] is not None}),
        **compare_logs(*logs),
        **compare_states(states[0], states[1]),
        "progress": storm.progress,
        "events": events,
    }


def _is_exact(row: Mapping[str, Any]) -> bool:
    lost = row["lost_samples"] + row["doubled_samples"] + row["other_batches"]
    return bool(row["bits_equal"] and row["losses_equal"] and not lost)


def make_claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """What was asked of the storms together."""

    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    faults = total("faults")
    spent = sum(row["seconds"] - row["undisturbed_seconds"] for row in rows)
    return [
        claim(
            "faults survived without a hang, all kinds mixed, in seeded runs",
            1000,
            faults,
            "faults",
            at_least=True,
        ),
        claim(
            "samples that a run lost or trained twice",
            0,
            total("lost_samples") + total("doubled_samples"),
            "samples",
            at_least=False,
        ),
        claim(
            "runs whose final tables, row state, weights and optimizer state, and all losses, are "
            "those of the undisturbed run to the bit",
            len(rows),
            sum(_is_exact(row) for row in rows),
            "runs",
            at_least=True,
        ),
        claim("seconds per fault", 3.0, spent / max(1, faults), "s", at_least=False),
    ]
