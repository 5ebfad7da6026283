"""Runs storms of faults, and compares their final states with undisturbed runs."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from faults.command_testbed import CommandTestbed
from faults.hosts_testbed import HostsTestbed, can_lose_packets
from faults.plan import KINDS, Fault, count_steps, order_worlds, plan_faults
from faults.proof import compare_logs, compare_states, read_final_state, read_log
from faults.setting import (
    FORKED,
    HOSTS,
    TORCHRUN,
    Setting,
    make_command,
    make_data,
    read_ranks,
)
from faults.storm import Storm
from faults.strikes import Strikes
from faults.testbed import LocalTestbed, adopt_orphans, mount_disk

from freescale.launch.rank_process import preload
from freescale_bench.common.hosts import Network, open_hosts
from freescale_bench.common.ranks import share_gpu
from freescale_bench.common.results import Destination, write
from freescale_bench.faults.claims import is_exact, make_claims
from freescale_bench.faults.jobs import find_row, run_side_by_side
from freescale_bench.faults.options import Options

# Seconds without a step after which a run counts as hung. Longer if torchrun has to notice a loss,
# processes start rather than fork, or kernels are compiled before the first step.
_LIMIT, _LONG_LIMIT = 120.0, 300.0


def list_kinds(disk: bool, hosts: int, snapshots: bool) -> list[str]:
    """Lists the kinds of faults that are possible here. `disk`: runs have their own disk."""
    there = {""} | ({"disk"} if disk else set()) | ({"snapshots"} if snapshots else set())
    if hosts > 1:
        there |= {"hosts"} | ({"packets"} if can_lose_packets() else set())
    return [name for name, kind in KINDS.items() if kind.needs in there]


def bench_faults(options: Options, to: Destination) -> int:
    """Runs the storms that are missing in the work folder. Returns 1 if a run differs from the
    undisturbed one."""
    preload()
    gc.freeze()  # ranks need not scan imported objects for garbage
    torch.set_num_threads(1)  # a fork would lose threads
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if options.jobs > 1:
        run_side_by_side(options, work)
    with _divide_gpu(options):
        rows = _make_storms(options, work)
    usual = options.storms and options.device == "cpu"
    claims = make_claims(rows, None if usual else sum(one[1] for one in options.plan()))
    struck = {event["kind"] for row in rows for event in row["events"]}
    about = {name: kind.about for name, kind in KINDS.items() if name in struck}
    write("faults", options.testbed, options.command, rows, claims, to=to, kinds=about)
    return int(not all(is_exact(row) for row in rows))


@contextmanager
def _divide_gpu(options: Options) -> Iterator[None]:
    """Sets the environment of ranks, which may have to share a GPU."""
    with ExitStack() as stack:
        if options.device == "cuda":
            # Ranks are forked, and CUDA does not start in the child of a process that has used it
            # to count GPUs. With this variable torch uses NVML instead.
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            ranks = max(most for _, most in read_ranks(options.ranks))
            if torch.cuda.device_count() < ranks:
                os.environ.update(stack.enter_context(share_gpu(ranks)))
        yield


def _make_storms(options: Options, work: Path) -> list[dict[str, Any]]:
    adopt_orphans()
    disk = mount_disk(work / "disk.img", work / "disk")
    if not disk:
        print("no faults of full disks here: mounting a disk needs root and mkfs.ext4", flush=True)
    rows = []
    with open_hosts(HOSTS) if options.host_storms else nullcontext() as network:
        for seed, faults, setting in options.plan():
            kinds = list_kinds(disk, setting.hosts, setting.snapshot_every > 0)
            over = network if setting.hosts > 1 else None
            rows.append(run_storm(work, seed, faults, setting, kinds, over))
    return rows


def run_storm(
    work: Path,
    seed: int,
    number: int,
    setting: Setting,
    kinds: Sequence[str],
    network: Network | None = None,
) -> dict[str, Any]:
    """Runs a storm and an undisturbed run. Returns the row of the result, which is kept in the work
    folder: a finished storm is not repeated."""
    folder, disk = work / f"storm-{seed}", work / "disk" / f"storm-{seed}"
    made = find_row(work, seed)
    if made.exists():
        found: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
        return found
    for path in (folder, disk):
        path.mkdir(parents=True, exist_ok=True)
    if not (folder / "events.parquet").exists():
        make_data(folder / "events.parquet")
    faults = plan_faults(seed, number, setting.world, kinds)
    print(f"storm {seed}: {setting.describe()}, {count_steps(faults)} steps", flush=True)
    worlds = order_worlds(seed, setting.fewest, setting.world)
    steps = count_steps(faults)
    calm = _run(folder, disk, "calm", [], steps, setting, worlds[:1], network)
    storm = _run(folder, disk, "storm", faults, steps, setting, worlds, network)
    row = _describe(folder, disk, seed, setting, storm, calm)
    made.write_text(json.dumps(row), encoding="utf-8")
    shutil.rmtree(disk)
    return row


def _run(
    folder: Path,
    disk: Path,
    name: str,
    faults: Sequence[Fault],
    steps: int,
    setting: Setting,
    worlds: Sequence[int],
    network: Network | None,
) -> Storm:
    """Makes a run, unless it is complete. An interrupted storm resumes; an undisturbed run starts
    over."""
    run, cache, own = disk / name, disk / "cache", folder / name
    if not faults and not (own / "complete").exists():
        for left in (run, own):
            shutil.rmtree(left, ignore_errors=True)
    own.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="fs-faults-"))  # socket paths must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "storm"))
        listener.listen(64)
        address = place / "storm"
        strikes = Strikes(run, cache, setting.timeout)
        storm = Storm(
            _make_testbed(own, setting, worlds, address, network),
            make_command(folder / "events.parquet", cache, run, steps, setting),
            faults,
            strikes,
            own / "state.json",
            listener,
            _LIMIT if _starts_quickly(setting) else _LONG_LIMIT,
        )
        try:
            if not (own / "complete").exists():
                strikes.clear()
                storm.run()
                (own / "complete").touch()
        finally:
            storm.testbed.close()
            shutil.rmtree(place)
    return storm


def _starts_quickly(setting: Setting) -> bool:
    return setting.hosts == 1 and setting.start == FORKED and setting.device == "cpu"


def _make_testbed(
    own: Path, setting: Setting, worlds: Sequence[int], address: Path, network: Network | None
) -> LocalTestbed:
    if network is not None:
        return HostsTestbed(own, setting.world, address, network)
    if setting.start != FORKED:
        torchrun = setting.start == TORCHRUN
        return CommandTestbed(own, setting.world, address, torchrun=torchrun)
    return LocalTestbed(own, worlds, address, double=setting.changes)


def _describe(
    folder: Path, disk: Path, seed: int, setting: Setting, storm: Storm, calm: Storm
) -> dict[str, Any]:
    names = ("storm", "calm")
    logs = [read_log(folder / name / "samples") for name in names]
    states = [
        read_final_state(disk / name, folder / name / "output.txt", double=setting.changes)
        for name in names
    ]
    events = storm.events
    restarted = [event for event in events if event["phases_s"]]
    forked = [event for event in restarted if event["forked"]]
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
            kind: {"count": len(lasted), "median": statistics.median(lasted), "max": max(lasted)}
            for kind, lasted in sorted(by_kind.items())
        },
        "phases_s": _find_medians(restarted),
        "forked_phases_s": _find_medians(forked),
        "forked_restarts": len(forked),
        "moments": sorted({event["struck_at"] for event in events if event["moment"] is not None}),
        **compare_logs(*logs),
        **compare_states(states[0], states[1]),
        "progress": storm.progress,
        "events": events,
    }


def _find_medians(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median of each phase of the restarts."""
    return {
        phase: statistics.median(event["phases_s"][phase] for event in events)
        for phase in (events[0]["phases_s"] if events else ())
    }
