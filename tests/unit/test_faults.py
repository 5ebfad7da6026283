"""Storms of faults: the plan, the moments that it names, and the comparison that finds what a run
lost."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from faults.events import Process, Struck, split_time
from faults.moments import MOMENTS, watch
from faults.plan import KINDS, count_steps, order_worlds, plan_faults, put_off
from faults.proof import compare_logs, compare_states, read_log
from faults.reporter import LAUNCHER
from faults.setting import read_ranks
from freescale_bench.faults.claims import is_exact
from freescale_bench.faults.options import Options

from freescale.launch import ranks, signals

ROW = {
    "world": 4,
    "fewest": 4,
    "lost_samples": 0,
    "doubled_samples": 0,
    "other_batches": 0,
    "bits_equal": True,
    "losses_equal": True,
    "loss_difference_a_step": 0.0,
    "difference": 0.0,
    "steps": 100,
}


@pytest.mark.parametrize(
    "other, exact",
    [
        ({}, True),
        ({"bits_equal": False, "difference": 1e-15}, False),
        ({"losses_equal": False}, False),
        ({"doubled_samples": 1}, False),
        # the number of ranks changes: within rounding
        ({"fewest": 2, "bits_equal": False, "losses_equal": False, "difference": 9e-11}, True),
        ({"fewest": 2, "bits_equal": False, "difference": 2e-10}, False),
        ({"fewest": 2, "loss_difference_a_step": 2e-12}, False),
        ({"fewest": 2, "lost_samples": 1}, False),
    ],
)
def test_a_run_is_the_undisturbed_one_to_the_bit_or_within_rounding(other, exact):
    assert is_exact(ROW | other) == exact


class TestStorms:
    options = Options(Path("storms"), 4, 2, 5, 100, 7, "2,4,2:4", 5.0)

    def test_are_of_machines_hosts_and_commands(self):
        planned = self.options.plan()
        assert [seed for seed, _, _ in planned] == list(range(7, 15))
        assert [faults for _, faults, _ in planned] == [100] * 6 + [3, 2]
        settings = [setting for _, _, setting in planned]
        assert [setting.hosts for setting in settings] == [1] * 4 + [2, 2] + [1, 1]
        assert [setting.changes for setting in settings[:4]] == [False, True, False, False]
        assert not any(setting.changes for setting in settings[4:])  # nor over hosts
        assert [setting.start for setting in settings[6:]] == ["freescale train", "torchrun"]
        assert "--host-storms 2 --real-starts 5" in self.options.command

    def test_of_one_arm_have_a_result_of_their_own(self):
        assert self.options.testbed == "cpu"
        assert replace(self.options, storms=0).testbed == "hosts"
        assert replace(self.options, storms=0, host_storms=0).testbed == "starts"

    def test_have_each_number_of_ranks(self):
        for seed in range(5):
            worlds = order_worlds(seed, 2, 4)
            assert sorted(worlds) == [2, 3, 4] and worlds == order_worlds(seed, 2, 4)
        assert len({tuple(order_worlds(seed, 2, 4)) for seed in range(20)}) > 3

    @pytest.mark.parametrize("text", ["4:2", "2:3:4", "two", "0", "2,,4"])
    def test_refuse_ranks_that_are_none(self, text):
        with pytest.raises(ValueError, match=f"--ranks {text}"):
            read_ranks(text)


class TestPhases:
    def split(self, *passed, gone=11.0, over=None):
        """Of ranks that passed the three moments at these times, after a fault at 10."""
        names = ("connect", "connected", "restored")
        of_ranks = [
            Process(rank, 1, 0, None, 0.0, passed=dict(zip(names, times, strict=True)))
            for rank, times in enumerate(passed)
        ]
        launcher = Process(LAUNCHER, 1, 0, None, 0.0)
        fault = plan_faults(0, 1, 2, list(KINDS))[0]
        return split_time(Struck(fault, 10.0, 5, "", over, 0, 2), gone, [launcher, *of_ranks], 20.0)

    def test_end_with_the_slowest_rank(self):
        found = self.split((14, 15, 17), (13, 16, 17.5))
        expected = {"notice": 1, "process start": 3, "rendezvous": 2, "restore": 1.5}
        assert found == expected | {"first step": 2.5}

    def test_are_left_out_where_they_are_not_those_of_one_start(self):
        assert self.split((14, 15, 17), over=12.0) == {}  # no attempt ended
        assert self.split((14, 15, 17), gone=16.0) == {}  # a rank of another attempt
        assert self.split() == {}


class TestPlan:
    def test_is_a_function_of_the_seed(self):
        plan = plan_faults(3, 50, 4, list(KINDS))
        assert plan == plan_faults(3, 50, 4, list(KINDS)) != plan_faults(4, 50, 4, list(KINDS))
        assert [fault.number for fault in plan] == list(range(50))

    def test_has_every_kind_and_every_moment_its_turn(self):
        plan = plan_faults(0, 600, 4, list(KINDS))
        kinds = Counter(fault.kind for fault in plan)
        assert set(kinds) == set(KINDS) and max(kinds.values()) - min(kinds.values()) <= 2
        struck = {fault.moment for fault in plan}
        assert struck == {moment.name for moment in MOMENTS} | {None}
        assert {fault.rank for fault in plan} == {0, 1, 2, 3}

    def test_strikes_where_and_when_it_can(self):
        groups = {moment.name: moment for moment in MOMENTS}
        for seed in range(20):
            plan = plan_faults(seed, 60, 2, list(KINDS))
            for before, fault in zip([None, *plan], plan, strict=False):
                kind, moment = KINDS[fault.kind], groups.get(fault.moment)
                if kind.is_of_start:  # something has to start
                    assert before is not None and KINDS[before.kind].ends
                assert moment is None or moment.group in kind.moments
                assert moment is None or not moment.rank_0 or fault.rank == 0
                low, high = kind.seconds
                assert low <= fault.seconds <= high
            pairs = zip(plan[:-1], plan[1:], strict=True)
            assert ("disk full", "disk full") not in {(a.kind, b.kind) for a, b in pairs}
            assert count_steps(plan) > sum(fault.after for fault in plan)

    def test_a_disk_that_was_full_when_the_storm_stopped_is_full_later(self):
        plan = plan_faults(0, 100, 2, list(KINDS))
        full = next(fault for fault in plan if fault.kind == "disk full")
        other = next(fault for fault in plan if fault.kind != "disk full")
        assert put_off(plan, other.number) == plan
        changed = put_off(plan, full.number)
        assert [
            one.after - two.after for one, two in zip(changed, plan, strict=True) if one != two
        ] == [8]

    def test_refuses_kinds_that_are_none(self):
        with pytest.raises(ValueError, match="no such kind of faults: rain"):
            plan_faults(0, 1, 2, ["rain"])
        with pytest.raises(ValueError, match="while the run trains"):
            plan_faults(0, 1, 2, ["kill in restore"])


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name)
def test_a_moment_is_a_function_of_the_library(moment):
    module, path = moment.function.split(":")
    found = import_module(f"freescale.{module}")
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)


def test_a_watched_function_is_reported_and_does_its_work(monkeypatch):
    reached = []
    monkeypatch.setattr(ranks, "find_free_port", lambda: 15)
    watch("launch.ranks:find_free_port", lambda: reached.append("before"))
    watch("launch.ranks:find_free_port", reached.append, after=True)
    assert ranks.find_free_port() == 15 and reached == ["before", 15]


class TestProof:
    def write(self, folder, *attempts):
        """Of each attempt: (step that it begins behind, by rank the steps with their samples)."""
        folder.mkdir()
        for number, (began, of_ranks) in enumerate(attempts):
            for rank, steps in enumerate(of_ranks):
                lines = [{"began": began, "world": len(of_ranks)}]
                lines += [
                    {
                        "step": step,
                        "batch": step - 1,
                        "loss": (2.0 / step).hex(),
                        "samples": list(s),
                    }
                    for step, s in steps.items()
                ]
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (folder / f"{number}-{rank}.jsonl").write_text(text)
        return read_log(folder)

    calm = (0, [{1: "a", 2: "b", 3: "c"}, {1: "d", 2: "e", 3: "f"}])

    def test_what_was_made_again_counts_once(self, tmp_path):
        calm = self.write(tmp_path / "calm", self.calm)
        storm = self.write(
            tmp_path / "storm",
            (0, [{1: "a", 2: "b"}, {1: "d"}]),
            (1, [{2: "e", 3: "c"}, {2: "b", 3: "f"}]),  # on other ranks than before
        )
        found = compare_logs(storm, calm)
        assert found["lost_samples"] == found["doubled_samples"] == found["other_batches"] == 0
        assert found["repeated_steps"] == 1 and found["losses_equal"] and found["steps"] == 3

    @pytest.mark.parametrize(
        "again, lost, doubled",
        [
            ((2, [{3: "c"}, {3: "f"}]), 1, 0),  # a rank never made step 2
            ((1, [{2: "b", 3: "c"}, {2: "b", 3: "f"}]), 1, 1),  # one sample on two ranks
            ((1, [{2: "b"}, {2: "e"}]), 2, 0),  # the last step is missing
        ],
    )
    def test_lost_and_doubled_samples_are_found(self, tmp_path, again, lost, doubled):
        calm = self.write(tmp_path / "calm", self.calm)
        storm = self.write(tmp_path / "storm", (0, [{1: "a", 2: "b"}, {1: "d"}]), again)
        found = compare_logs(storm, calm)
        assert (found["lost_samples"], found["doubled_samples"]) == (lost, doubled)

    def test_a_bit_is_found(self):
        calm = {"rows": torch.ones(3), "weight": torch.ones(2)}
        assert compare_states(calm, calm)["bits_equal"]
        other = calm | {"rows": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}
        found = compare_states(other, calm)
        assert found["differing_tensors"] == ["rows"] and not found["bits_equal"]
        assert found["difference"] == 2**-23


class Rank:
    """A process of ranks.py that ends when it is told to."""

    def __init__(self, status=None):
        self.status, self.got = status, []

    def poll(self):
        return self.status

    def send_signal(self, number):
        if self.status is None:
            self.got.append(number)
            self.status = -number

    def wait(self, timeout):
        return self.status


def refuse_to_begin(rank):
    raise AssertionError(f"rank {rank} was started again")


def test_ranks_that_cannot_notice_a_failure_are_told(monkeypatch):
    monkeypatch.setattr(ranks, "_NOTICE", 0.1)
    waiting, failing = Rank(), Rank(1)
    failed, _ = ranks._watch([waiting, failing], 5, refuse_to_begin)
    assert failed == (1, 1) and waiting.got == [signal.SIGTERM]


@pytest.mark.parametrize("gpus", ["/", "/no-such-device"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_ranks_whose_peer_is_dead_end_with_it(monkeypatch, number, gpus):
    """They may wait for it where no signal reaches them: sooner where there are GPUs."""
    monkeypatch.setattr(ranks, "_GPUS", Path(gpus))
    monkeypatch.setattr(ranks, "_KILL_GRACE" if gpus == "/" else "_NOTICE", 0.1)
    if gpus == "/":
        monkeypatch.setattr(ranks, "_NOTICE", 60)
    waiting, killed = Rank(), Rank(-number)
    failed, _ = ranks._watch([waiting, killed], 5, refuse_to_begin)
    assert failed == (1, -number) and waiting.got == [signal.SIGKILL]


@pytest.mark.parametrize("statuses", [[-signal.SIGTERM], [signals.REQUEUE, -signal.SIGKILL]])
def test_ranks_that_may_be_saving_are_not_killed(monkeypatch, statuses):
    monkeypatch.setattr(ranks, "_GPUS", Path("/"))
    monkeypatch.setattr(ranks, "_KILL_GRACE", 0.0)
    monkeypatch.setattr(ranks, "_NOTICE", 0.1)
    monkeypatch.setattr(ranks, "_GRACE", 0.3)
    saving = Rank()
    ranks._watch([saving, *map(Rank, statuses)], 5, refuse_to_begin)
    assert saving.got == [signal.SIGTERM]
