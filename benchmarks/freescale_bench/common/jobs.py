"""Runs commands, several at a time, each with its own log."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from freescale_bench.common.repository import package_path


@dataclass(frozen=True)
class Job:
    name: str
    command: Sequence[str]
    log: Path


def run_jobs(jobs: Sequence[Job], at_a_time: int) -> None:
    """Runs all jobs. If some fail, the others still finish.

    Raises:
        ValueError: names the failed jobs, with the last line of their logs.
    """
    if not jobs:
        return
    running: set[subprocess.Popen[bytes]] = set()
    cores = max(1, (os.cpu_count() or 1) // at_a_time)
    environment = {"OMP_NUM_THREADS": str(cores), **os.environ, "PYTHONPATH": package_path()}
    guard = threading.Lock()

    def run(job: Job) -> int:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            with guard:
                process = subprocess.Popen(
                    job.command, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
                running.add(process)
            status = process.wait()
            running.discard(process)
            return status

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)  # end the jobs with this process
    failed: list[Job] = []
    with ThreadPoolExecutor(at_a_time) as pool:
        started = {pool.submit(run, job): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(started), start=1):
                job = started[future]
                status = future.result()
                failed += [job] if status else []
                state = f"failed with status {status}" if status else "done"
                print(f"{job.name}: {state} ({done} of {len(jobs)})", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with guard:
                for process in list(running):
                    process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if failed:
        ends = [f"{job.name} ({job.log}): {_read_end(job.log)}" for job in failed]
        raise ValueError("these runs failed: " + "; ".join(ends))


def _read_end(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"
