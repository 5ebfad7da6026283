"""`freescale bench all`: the registry, what a machine can run, and a run of stand-ins that fail,
write nothing or are done."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from freescale.bench.all import Runner
from freescale.bench.common.repository import commit
from freescale.bench.registry import Benchmark, Machine, chosen, done_before, read_registry
from freescale.cli.main import main

ROOT = Path(__file__).resolve().parents[2]

from freescale.bench.common import results
from freescale.bench.workload import bench as bench_workload

BARE = Machine(cores=1, hosts=False, gpu="", gpus=0, mps=False, file=None)
RICH = Machine(cores=64, hosts=True, gpu="h200", gpus=1, mps=True, file="retail.parquet")

# Writes what results.write would, into the folder that it is told.
GOOD = """
import json, os, pathlib, sys
claims = [{"holds": True}, {"holds": False}]
result = {"claims": claims, "commit": sys.argv[2], "machine": {"cpu": "x"}, "date": "2026-01-02T03:04:05Z"}
pathlib.Path(os.environ["FREESCALE_RESULTS"], sys.argv[1]).write_text(json.dumps(result))
"""


def test_every_script_and_its_result_is_in_the_registry():
    registry = read_registry()
    for script in (ROOT / "benchmarks").glob("bench_*.py"):
        assert any(f"benchmarks/{script.name}" in one.command for one in registry), (
            f"{script.name} is not in registry.toml"
        )
    for one in registry:
        script = next(word for word in one.command.split() if word.startswith("benchmarks/"))
        assert (ROOT / script).is_file(), one
        assert ("{peer}" in one.command) == ("torchrec" in one.needs) and (
            "{file}" in one.command
        ) == ("file" in one.needs), one
        assert not RICH.lacks(one) and "{" not in RICH.result_of(one)
    assert "ladder-paper-hosts.json" in map(
        RICH.result_of, registry
    ) and "kernels-h200.json" in map(RICH.result_of, registry)


def test_what_a_machine_lacks():
    def lacks(machine: Machine, *needs: str, ranks: int = 0) -> str:
        return machine.lacks(Benchmark("x", "{python}", "x.json", needs, 1, ranks))

    assert (
        not lacks(BARE) and "two cores" in lacks(BARE, "cores") and "root" in lacks(BARE, "hosts")
    )
    assert "GPU" in lacks(BARE, "gpu") and "--file" in lacks(BARE, "file")
    assert not lacks(RICH, "cores", "hosts", "gpu", "file", "torchrec", ranks=4)
    assert "MPS" in lacks(replace(RICH, mps=False), "gpu", ranks=4) and not lacks(
        replace(RICH, mps=False, gpus=4), "gpu", ranks=4
    )
    assert BARE.testbed == "loopback" and RICH.testbed == "hosts"
    with pytest.raises(ValueError, match="what can be needed"):
        Benchmark("x", "", "", ["moon"], 1)


def test_only_keeps_the_order_and_refuses_others():
    registry = read_registry()
    assert [one.name for one in chosen(registry, ["memory", "workload"])] == ["workload", "memory"]
    with pytest.raises(ValueError, match="no benchmark nonsense; there is workload"):
        chosen(registry, ["nonsense"])


def stand_ins(root: Path, commit: str = "unknown") -> list[Benchmark]:
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "good.py").write_text(GOOD)
    return [
        Benchmark("fails", "{python} -c 'import sys; sys.exit(3)'", "fails.json", [], 1),
        Benchmark("silent", "{python} -c 'print()'", "silent.json", [], 1),
        Benchmark("good", f"{{python}} benchmarks/good.py good.json {commit}", "good.json", [], 1),
        Benchmark("slow link", "{python} -c 'print()'", "x.json", ["hosts"], 1),
    ]


def test_goes_on_after_a_failure_and_says_so(tmp_path, capfd):
    folder = tmp_path / "results"
    folder.mkdir()
    runner = Runner(tmp_path, folder, BARE)
    assert runner.run(stand_ins(tmp_path), skip_done=False) == 1
    said = capfd.readouterr().out
    assert (
        "[1 of 3] fails: about 1 min; then 2 more, about 2 min" in said
        and "[3 of 3] good: about 1 min; the last" in said
    )
    assert (
        runner.outcomes["fails"] == ("FAILED", runner.outcomes["fails"][1])
        and "status 3" in runner.outcomes["fails"][1]
    )
    assert (
        runner.outcomes["silent"][0] == "FAILED"
        and "wrote no silent.json" in runner.outcomes["silent"][1]
    )
    assert (
        runner.outcomes["good"][0] == "done" and "1 of 2 claims hold" in runner.outcomes["good"][1]
    )
    assert runner.outcomes["slow link"][0] == "left out" and "root" in said.split("slow link")[-1]
    assert Runner(tmp_path, folder, BARE).run(stand_ins(tmp_path / "b")[2:3], skip_done=False) == 0


def test_what_was_not_reached_is_shown_after_an_interrupt(tmp_path, capfd, monkeypatch):
    runner = Runner(tmp_path, tmp_path, BARE)
    monkeypatch.setattr(
        Runner, "_start", lambda self, one: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run(stand_ins(tmp_path), skip_done=False)
    assert "good       not reached" in capfd.readouterr().out


def test_done_is_of_this_commit_and_machine(tmp_path):
    path, here = tmp_path / "x.json", {"cpu": "x"}
    path.write_text(json.dumps({"commit": "abc", "machine": here, "date": "2026-01-02T03:04:05Z"}))
    assert done_before(path, "abc", 1e12, here) == "2026-01-02T03:04:05Z"
    assert not done_before(path, "abd", 0, here) and not done_before(path, "abc", 0, {"cpu": "y"})
    assert not done_before(tmp_path / "none.json", "abc", 0, here)
    path.write_text(json.dumps({"commit": "abc+", "machine": here, "date": "2026-01-02T03:04:05Z"}))
    # a file was written later
    assert done_before(path, "abc+", 0, here) and not done_before(path, "abc+", 1e12, here)


def test_skip_done_leaves_out_what_this_tree_measured(tmp_path, monkeypatch):
    for words in (
        ["init", "-q"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    good = stand_ins(tmp_path, head.stdout.strip() + "+")[2]
    monkeypatch.setattr("freescale.bench.all.described", lambda: {"cpu": "x"})
    monkeypatch.setattr("freescale.bench.all.changed", lambda root: 0.0)
    first, second = (Runner(tmp_path, tmp_path, BARE) for _ in range(2))
    assert first.run([good], skip_done=True) == 0 and first.outcomes["good"][0] == "done"
    assert second.run([good], skip_done=True) == 0 and second.outcomes["good"][0] == "done before"


def test_torchrec_that_cannot_be_set_up_leaves_out_its_benchmarks(tmp_path, monkeypatch):
    def refuse(root: Path) -> str:
        raise ValueError("no network")

    monkeypatch.setattr("freescale.bench.all.peer_python", refuse)
    runner = Runner(tmp_path, tmp_path, BARE)
    both = [Benchmark(name, "{peer} x.py", f"{name}.json", ["torchrec"], 1) for name in ("a", "b")]
    assert runner.run(both, skip_done=False) == 0
    assert [what for what, _ in runner.outcomes.values()] == ["left out", "left out"]


def test_list_as_a_command(capfd):
    done = CliRunner().invoke(main, ["bench", "all", "--list"])
    assert done.exit_code == 0 and "workload-cpu.json" in done.output and "about" in done.output
    wrong = CliRunner().invoke(main, ["bench", "all", "--only", "nonsense"])
    assert wrong.exit_code == 1


def test_results_go_where_they_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FREESCALE_RESULTS", str(tmp_path / "new"))
    path = results.write(
        "tiny",
        "cpu",
        "a command",
        [{"arm": "x"}],
        [results.claim("fast", 1, 2, "s", at_least=False)],
    )
    assert path == tmp_path / "new" / "tiny-cpu.json" and str(path) in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert (
        kept["command"] == "a command"
        and kept["claims"][0]["holds"] is False
        and kept["commit"] == commit(ROOT)
    )


def test_the_workload_benchmark():
    none, fixed, greedy = bench_workload.shape("batch", 32)
    assert none["ranks"] == 64 and none["sparsity_percent"]["median"] == pytest.approx(75, abs=4)
    assert (
        none["straggler_percent"]["median"]
        > 5 * fixed["straggler_percent"]["median"]
        > greedy["straggler_percent"]["median"]
    )
    lengths = np.array([10, 5, 1, 1])
    assert bench_workload.sparsity(lengths, np.array([0, 0, 1, 1]), 2) == pytest.approx(
        (0.25 + 0.0) / 2
    )
    few, many = (bench_workload.expected("ranks", ranks)["collision_percent"] for ranks in (8, 64))
    assert 30 < few < many < 70
    drawn, expected = bench_workload.drawn(4)
    assert drawn["collision_percent"] == pytest.approx(expected["collision_percent"], abs=2)
