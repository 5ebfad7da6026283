"""Parallel storms on one machine. Each is a separate program with its own disk and, on a GPU, its
own MPS."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from freescale_bench.common.jobs import Job, run_jobs
from freescale_bench.faults.options import Options


def run_side_by_side(options: Options, work: Path) -> None:
    """Runs the storms that are missing in the work folder, `jobs` at a time.

    Raises:
        ValueError: a storm did not finish.
    """
    seeds = range(options.seed, options.seed + options.storms)
    left = {seed: work / f"job-{seed}" for seed in seeds if not find_row(work, seed).exists()}
    try:
        run_jobs([_make_job(options, seed, own) for seed, own in left.items()], options.jobs)
    except ValueError:  # also the status of storms whose run differs from the undisturbed one
        if not all(find_row(own, seed).exists() for seed, own in left.items()):
            raise
    finally:
        for seed, own in left.items():
            if find_row(own, seed).exists():
                find_row(work, seed).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(find_row(own, seed), find_row(work, seed))


def find_row(work: Path, seed: int) -> Path:
    """Returns the path of a storm's row, which exists once the storm is finished."""
    return work / f"storm-{seed}" / "row.json"


def _make_job(options: Options, seed: int, own: Path) -> Job:
    words = ["--device", options.device, "--storms", "1", "--jobs", "1", "--seed", str(seed)]
    words += ["--faults", str(options.faults), "--ranks", options.ranks]
    words += ["--timeout", str(options.timeout), "--work", str(own), "--folder", str(own)]
    command = [sys.executable, "-m", "freescale_bench.faults", *words]
    return Job(f"storm {seed}", command, own / "log.txt")
