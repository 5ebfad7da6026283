"""A small storm of faults: a run that is killed, stalled and cut off twenty times ends as the one
that nothing happened to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from freescale_bench.common.repository import package_path


def bench(folder: Path, *words: object) -> dict:
    """The only row of the result."""
    command = [sys.executable, "-m", "freescale_bench.faults", *map(str, words)]
    command += ["--work", str(folder / "work"), "--folder", str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": package_path()},
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (result,) = folder.glob("faults-*.json")
    (row,) = json.loads(result.read_text())["rows"]
    return row


@pytest.mark.long
def test_a_run_through_twenty_faults_is_the_run_that_nothing_happened_to(tmp_path):
    words = ["--storms", 1, "--faults", 20, "--ranks", 2, "--seed", 8, "--timeout", 6]
    row = bench(tmp_path, *words)
    assert row["faults"] == len(row["events"]) == 20
    assert row["lost_samples"] == row["doubled_samples"] == 0
    assert row["bits_equal"] and row["losses_equal"] and row["repeated_steps"] > 20
    assert len({event["kind"] for event in row["events"]}) >= 10


@pytest.mark.long
def test_ranks_that_the_command_forks_after_a_fault_report_their_phases(tmp_path):
    row = bench(tmp_path, "--storms", 0, "--real-starts", 1, "--seed", 3, "--timeout", 6)
    (event,) = row["events"]
    assert event["forked"] and row["forked_restarts"] == 1
    assert row["forked_phases_s"] == event["phases_s"] and len(event["phases_s"]) == 5
    assert row["bits_equal"] and row["losses_equal"]
