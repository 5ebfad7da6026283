"""Storms of one machine side by side: each is a program of its own, with a disk and, on a GPU, an
MPS of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freescale.bench.faults.bench import Options


def run_side_by_side(options: Options, work: Path) -> None:
    """Makes those storms of one machine that the work folder does not have yet, `jobs` at a time.

    Raises:
        ValueError: a storm did not come to its end.
    """
    seeds = range(options.seed, options.seed + options.storms)
    left = [seed for seed in seeds if not find_row(work, seed).exists()]
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while left or running:
            while left and len(running) < options.jobs:
                seed = left.pop(0)
                running[seed] = _start(options, work, seed)
            for seed in _wait_for_one(running):
                _adopt(work, seed)
    finally:
        for program in running.values():
            program.terminate()


def find_row(work: Path, seed: int) -> Path:
    """Where the row of a storm is, once it was made."""
    return work / f"storm-{seed}" / "row.json"


def _find_own(work: Path, seed: int) -> Path:
    return work / f"job-{seed}"


def _start(options: Options, work: Path, seed: int) -> subprocess.Popen[bytes]:
    own = _find_own(work, seed)
    own.mkdir(parents=True, exist_ok=True)
    words = ["--device", options.device, "--storms", "1", "--jobs", "1", "--seed", str(seed)]
    words += ["--faults", str(options.faults), "--ranks", options.ranks]
    words += ["--timeout", str(options.timeout), "--work", str(own), "--folder", str(own)]
    print(f"storm {seed}: {options.faults} faults, log in {own / 'log.txt'}", flush=True)
    with open(own / "log.txt", "ab") as log:
        command = [sys.executable, "-m", "freescale.bench.faults", *words]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _wait_for_one(running: dict[int, subprocess.Popen[bytes]]) -> list[int]:
    """Storms that have ended, one at least."""
    while not (ended := [seed for seed, program in running.items() if program.poll() is not None]):
        time.sleep(0.2)
    for seed in ended:
        del running[seed]
    return ended


def _adopt(work: Path, seed: int) -> None:
    made = find_row(_find_own(work, seed), seed)
    if not made.exists():
        log = _find_own(work, seed) / "log.txt"
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"storm {seed} did not end: {' '.join(last)} (all of it is in {log})")
    find_row(work, seed).parent.mkdir(exist_ok=True)
    shutil.copyfile(made, find_row(work, seed))
    print(f"storm {seed}: is done", flush=True)
