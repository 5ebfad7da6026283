"""Storms side by side: programs of their own, whose rows are where the storms' are."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from freescale_bench.common import jobs as common_jobs
from freescale_bench.faults import jobs
from freescale_bench.faults.options import Options

# Stands for the program: the first two wait for each other; the row counts those before it.
_PROGRAM = """
import json, pathlib, sys, time
words = sys.argv[1:]
seed, own = (words[words.index(name) + 1] for name in ("--seed", "--work"))
work, end = pathlib.Path(own).parent, time.monotonic() + 60
before = len(list(work.glob("job-*/storm-*/row.json")))
(work / f"begun-{seed}").touch()
while seed != "6" and len(list(work.glob("begun-[45]"))) < 2 and time.monotonic() < end:
    time.sleep(0.02)
if int(seed) == FAILS:
    sys.exit("the storm was lost")
row = pathlib.Path(own) / f"storm-{seed}" / "row.json"
row.parent.mkdir()
row.write_text(json.dumps({"seed": int(seed), "before": before}))
"""


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Makes the programs; the number is of the storm that fails."""

    def replace_program(fails):
        program = tmp_path / "program.py"
        program.write_text(_PROGRAM.replace("FAILS", str(fails)))
        start = common_jobs.subprocess.Popen

        def popen(command, **options):
            return start([sys.executable, program, *command[3:]], **options)

        monkeypatch.setattr(common_jobs.subprocess, "Popen", popen)
        return replace(Options(tmp_path, 3, 0, 0, 10, 4, "2", 5.0), jobs=2)

    return replace_program


def read(work, seed):
    return json.loads(jobs.find_row(work, seed).read_text())


def test_run_so_many_at_a_time_and_are_not_made_again(programs, tmp_path):
    options, work = programs(fails=-1), tmp_path / "work"
    jobs.run_side_by_side(options, work)
    first, second, third = (read(work, seed) for seed in (4, 5, 6))
    assert first["before"] == second["before"] == 0 < third["before"]
    jobs.run_side_by_side(options, work)
    assert [read(work, seed) for seed in (4, 5, 6)] == [first, second, third]


def test_a_storm_that_is_lost_is_named_and_the_others_stay(programs, tmp_path):
    work = tmp_path / "work"
    with pytest.raises(ValueError, match="storm 5 .*: the storm was lost"):
        jobs.run_side_by_side(programs(fails=5), work)
    assert [jobs.find_row(work, seed).exists() for seed in (4, 5, 6)] == [True, False, True]
