"""Useful time under failures, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner
from freescale_bench.simulate.recovery import (
    BUDDY,
    DISK,
    MEMORY,
    RecoveryCosts,
    Training,
    command,
    compute_useful_time,
    load_recovery,
)

from freescale.simulate.network import list_names

COSTS = RecoveryCosts(
    "by hand",
    notice_s=1.0,
    start_s=8.0,
    meet_s=0.5,
    meet_per_rank_s=0.01,
    meet_per_pair_s=0.001,
    restore_s=0.2,
    memory_gb_per_s=2.0,
    disk_gb_per_s=0.5,
    first_step_s=3.0,
    snapshot_percent=1.0,
    snapshot_s=0.4,
    checkpoint_s=5.0,
)
TRAINING = Training(
    gpus=50,
    step_s=0.1,
    state_gb=4.0,
    snapshot_every=20,
    checkpoint_every=1000,
    far_gb_per_s=8.0,
)


@pytest.mark.parametrize(
    "source, restore, repeated",
    [
        (MEMORY, 0.2 + 2.0, 10 * 0.101 + 0.4),
        (BUDDY, 0.2 + 2.0 + 0.5, 10 * 0.101 + 0.4),
        (DISK, 0.2 + 8.0, 500 * 0.101 + 5.0),
    ],
)
def test_is_what_the_parts_leave(source, restore, repeated):
    found = compute_useful_time(COSTS, TRAINING, 600.0, source)
    parts = {
        "notice": 1.0,
        "process start": 8.0,
        "rendezvous": 0.5 + 50 * 0.01 + 2500 * 0.001,
        "restore": restore,
        "first step": 3.0,
        "repeated steps": repeated,
    }
    assert found["seconds"] == pytest.approx(parts)
    assert found["useful"] == pytest.approx((600 - 15.5 - restore - repeated) / 600 / 1.01)


def test_failures_faster_than_a_recovery_leave_nothing():
    assert compute_useful_time(COSTS, TRAINING, 5.0, DISK)["useful"] == 0.0


def test_costs_that_are_shipped_have_a_source_for_every_number():
    import tomllib

    from freescale_bench.simulate.recovery import RECOVERIES

    assert (names := list_names(RECOVERIES))
    for name in names:
        costs = dataclasses.asdict(load_recovery(name))
        raw = tomllib.loads((RECOVERIES / f"{name}.toml").read_text(encoding="utf-8"))
        assert set(raw["sources"]) == set(costs) - {"name", "about"}


@pytest.mark.parametrize(
    "text, words",
    [
        ("notice_s = 1.0", "'start_s' is missing"),
        ("rain = 1.0", "unknown 'rain'"),
        ("notice_s =", "not readable as TOML"),
    ],
)
def test_a_file_that_holds_no_costs_is_refused(text, words, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_recovery(str(path))
    with pytest.raises(ValueError, match="there is h200, this-machine"):
        load_recovery("theirs")
    with pytest.raises(ValueError, match="disk_gb_per_s is 0; it must be above 0"):
        dataclasses.replace(COSTS, disk_gb_per_s=0)


def test_the_command_prints_what_each_failure_costs():
    words = ["--gpus", "16", "--steps", "3", "--schedule", "staged", "--layers", "1"]
    words += ["--batch", "2", "--items", "1000", "--failure-every", "600", "--state-gb", "1"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0 and "useful time" in done.output
    for word in ("memory", "buddy", "disk", "recovery: this-machine"):
        assert word in done.output
