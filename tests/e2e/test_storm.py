"""A small storm of faults: a run that is killed, stalled and cut off twenty times ends as the one
that nothing happened to."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from freescale.bench.common.repository import package_path


@pytest.mark.long
def test_a_run_through_twenty_faults_is_the_run_that_nothing_happened_to(tmp_path):
    command = [sys.executable, "-m", "freescale.bench.faults", "--storms", "1", "--faults", "20"]
    command += ["--ranks", "2", "--seed", "8", "--timeout", "6"]
    command += ["--work", str(tmp_path / "work"), "--folder", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": package_path()},
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (row,) = json.loads((tmp_path / "faults-cpu.json").read_text())["rows"]
    assert row["faults"] == len(row["events"]) == 20
    assert row["lost_samples"] == row["doubled_samples"] == 0
    assert row["bits_equal"] and row["losses_equal"] and row["repeated_steps"] > 20
    assert len({event["kind"] for event in row["events"]}) >= 10
