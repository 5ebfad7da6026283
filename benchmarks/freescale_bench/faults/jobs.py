"""Storms of one machine side by side: each is a program of its own, with a disk and, on a GPU, an
MPS of its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from freescale_bench.common.jobs import Job, run_jobs
from freescale_bench.faults.options import Options


def run_side_by_side(options: Options, work: Path) -> None:
    """Makes those storms of one machine that the work folder does not have yet, `jobs` at a time.

    Raises:
        ValueError: a storm did not come to its end.
    """
    seeds = range(options.seed, options.seed + options.storms)
    left = {seed: work / f"job-{seed}" for seed in seeds if not find_row(work, seed).exists()}
    try:
        run_jobs([_make_job(options, seed, own) for seed, own in left.items()], options.jobs)
    except ValueError:  # so end also storms whose run differs from the undisturbed one
        if not all(find_row(own, seed).exists() for seed, own in left.items()):
            raise
    finally:
        for seed, own in left.items():
            if find_row(own, seed).exists():
                find_row(work, seed).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(find_row(own, seed), find_row(work, seed))


def find_row(work: Path, seed: int) -> Path:
    """Where the row of a storm is, once it was made."""
    return work / f"storm-{seed}" / "row.json"


def _make_job(options: Options, seed: int, own: Path) -> Job:
    words = ["--device", options.device, "--storms", "1", "--jobs", "1", "--seed", str(seed)]
    words += ["--faults", str(options.faults), "--ranks", options.ranks]
    words += ["--timeout", str(options.timeout), "--work", str(own), "--folder", str(own)]
    command = [sys.executable, "-m", "freescale_bench.faults", *words]
    return Job(f"storm {seed}", command, own / "log.txt")
