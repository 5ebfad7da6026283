"""`freescale bench all`: the registry, what a machine can run, and a run of stand-ins that fail,
write nothing or are done."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from freescale_bench import BENCHMARKS
from freescale_bench import all as all_benchmarks
from freescale_bench.command import bench
from freescale_bench.common import repository, results, torchrec
from freescale_bench.common.repository import find_commit
from freescale_bench.registry import Benchmark, Machine, choose, find_done, read_registry

from freescale.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BARE = Machine(cores=1, hosts=False, gpu="", gpus=0, mps=False, file=None)
RICH = Machine(cores=64, hosts=True, gpu="h200", gpus=1, mps=True, file="retail.parquet")

# Writes what results.write would, into the folder that it is told.
GOOD = """
import json, pathlib, sys
claims = [{"holds": True}, {"holds": False}]
result = {"claims": claims, "commit": sys.argv[2], "machine": {"cpu": "x"}}
result["date"] = "2026-01-02T03:04:05Z"
pathlib.Path(sys.argv[4], sys.argv[1]).write_text(json.dumps(result))
"""


class Runner(all_benchmarks.Runner):
    """Runs stand-ins: what a benchmark's command names is a program in `-c`."""

    def _make_command(self, one, python):
        words = super()._make_command(one, python)
        assert words[:2] == [python, "-m"] and words[-2:] == ["--folder", str(self.folder)]
        program = {"fails": "import sys; sys.exit(3)", "good": GOOD}.get(one.name, "print()")
        return [python, "-c", program, *words[3:]]


def test_every_benchmark_is_in_the_registry_and_a_command():
    folder = Path(all_benchmarks.__file__).parent
    packages = {path.parent.name for path in folder.glob("*/__main__.py")}
    assert packages == set(BENCHMARKS) == {one.command.split()[0] for one in read_registry()}
    assert set(bench.commands) == packages | {"all", "figures"}
    for one in read_registry():
        assert ("{file}" in one.command) == ("file" in one.needs), one
        assert not RICH.find_lack(one) and "{" not in RICH.name_result(one)
    names = [RICH.name_result(one) for one in read_registry()]
    assert "ladder-paper-hosts.json" in names and "kernels-h200.json" in names


@pytest.mark.parametrize("one", read_registry(), ids=lambda one: one.name)
def test_a_command_of_the_registry_is_understood(one, monkeypatch):
    """Up to where the benchmark itself begins."""
    name, *words = one.command.replace("{file}", "retail.parquet").split()
    main = import_module(f"freescale_bench.{name}.__main__").main
    parsed = []
    plain = argparse.ArgumentParser.parse_args

    def parse(parser, arguments):
        parsed.append(plain(parser, arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(KeyboardInterrupt):
        main([*words, "--folder", "elsewhere"])
    assert parsed[0].folder == Path("elsewhere")


def test_help_of_a_benchmark_does_not_wait_for_torch():
    program = f"""
import contextlib, sys
from freescale.cli.main import main

for name in {list(BENCHMARKS)}:
    with contextlib.suppress(SystemExit):
        main(["bench", name, "--help"])
sys.exit("torch" in sys.modules or "numpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: freescale bench {name}" in done.stdout for name in BENCHMARKS)


def test_what_a_machine_lacks():
    def lacks(machine: Machine, *needs: str, ranks: int = 0) -> str:
        return machine.find_lack(Benchmark("x", "{python}", "x.json", needs, 1, ranks))

    assert (
        not lacks(BARE) and "two cores" in lacks(BARE, "cores") and "root" in lacks(BARE, "hosts")
    )
    assert "GPU" in lacks(BARE, "gpu") and "--file" in lacks(BARE, "file")
    assert not lacks(RICH, "cores", "hosts", "gpu", "file", "torchrec", ranks=4)
    assert "MPS" in lacks(replace(RICH, mps=False), "gpu", ranks=4) and not lacks(
        replace(RICH, mps=False, gpus=4), "gpu", ranks=4
    )
    assert BARE.testbed == "loopback" and RICH.testbed == "hosts"
    with pytest.raises(ValueError, match="moon; known needs are cores"):
        Benchmark("x", "", "", ["moon"], 1)


def test_only_keeps_the_order_and_refuses_others():
    registry = read_registry()
    assert [one.name for one in choose(registry, ["kernels", "balance"])] == ["balance", "kernels"]
    with pytest.raises(ValueError, match="no benchmark nonsense; there is balance"):
        choose(registry, ["nonsense"])


def stand_ins(commit: str = "unknown") -> list[Benchmark]:
    return [
        Benchmark("fails", "balance", "fails.json", [], 1),
        Benchmark("silent", "balance", "silent.json", [], 1),
        Benchmark("good", f"balance good.json {commit}", "good.json", [], 1),
        Benchmark("slow link", "balance", "x.json", ["hosts"], 1),
    ]


def test_goes_on_after_a_failure_and_says_so(tmp_path, capfd):
    folder = tmp_path / "results"
    folder.mkdir()
    runner = Runner(tmp_path, folder, BARE)
    assert runner.run(stand_ins(), skip_done=False) == 1
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
    assert Runner(tmp_path, folder, BARE).run(stand_ins()[2:3], skip_done=False) == 0


def test_what_was_not_reached_is_shown_after_an_interrupt(tmp_path, capfd, monkeypatch):
    runner = Runner(tmp_path, tmp_path, BARE)
    monkeypatch.setattr(
        Runner, "_start", lambda self, command: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run(stand_ins(), skip_done=False)
    assert "good       not reached" in capfd.readouterr().out


def test_done_is_of_this_commit_and_machine(tmp_path):
    path, here = tmp_path / "x.json", {"cpu": "x"}
    path.write_text(json.dumps({"commit": "abc", "machine": here, "date": "2026-01-02T03:04:05Z"}))
    assert find_done(path, "abc", 1e12, here) == "2026-01-02T03:04:05Z"
    assert not find_done(path, "abd", 0, here) and not find_done(path, "abc", 0, {"cpu": "y"})
    assert not find_done(tmp_path / "none.json", "abc", 0, here)
    path.write_text(json.dumps({"commit": "abc+", "machine": here, "date": "2026-01-02T03:04:05Z"}))
    # a file was written later
    assert find_done(path, "abc+", 0, here) and not find_done(path, "abc+", 1e12, here)


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
    good = stand_ins(head.stdout.strip())[2]
    monkeypatch.setattr("freescale_bench.all.describe_machine", lambda: {"cpu": "x"})
    monkeypatch.setattr("freescale_bench.all.find_last_change", lambda root: 0.0)
    first, second = (Runner(tmp_path, tmp_path, BARE) for _ in range(2))
    assert first.run([good], skip_done=True) == 0 and first.outcomes["good"][0] == "done"
    assert second.run([good], skip_done=True) == 0 and second.outcomes["good"][0] == "done before"


def test_torchrec_that_cannot_be_set_up_leaves_out_its_benchmarks(tmp_path, monkeypatch):
    def refuse(root: Path) -> str:
        raise ValueError("no network")

    monkeypatch.setattr("freescale_bench.all.set_up_peer", refuse)
    runner = Runner(tmp_path, tmp_path, BARE)
    both = [Benchmark(name, "ladder", f"{name}.json", ["torchrec"], 1) for name in ("a", "b")]
    assert runner.run(both, skip_done=False) == 0
    assert [what for what, _ in runner.outcomes.values()] == ["left out", "left out"]


def test_list_as_a_command(capfd):
    done = CliRunner().invoke(main, ["bench", "all", "--list"])
    assert done.exit_code == 0 and "balance-cpu.json" in done.output and "about" in done.output
    wrong = CliRunner().invoke(main, ["bench", "all", "--only", "nonsense"])
    assert wrong.exit_code == 1


def test_results_go_where_they_are_told(tmp_path, capsys):
    path = results.write(
        "tiny",
        "cpu",
        "a command",
        [{"arm": "x"}],
        [results.at_most("fast", 1, 2, "s")],
        to=results.Destination(tmp_path / "new"),
    )
    assert path == tmp_path / "new" / "tiny-cpu.json" and str(path) in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert (
        kept["command"] == "a command"
        and kept["claims"][0]["holds"] is False
        and kept["commit"] == find_commit(ROOT)
    )


def test_without_a_repository_results_go_to_the_folder_at_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "find_repository", lambda: None)
    assert results.Destination().find_folder() == Path("results")
    monkeypatch.setattr(repository, "find_repository", lambda: None)
    with pytest.raises(ValueError, match="`pip install -e ./benchmarks` in a clone"):
        repository.require_repository()
    assert repository.find_commit() == "unknown"


def test_without_a_repository_torchrec_is_left_out_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torchrec, "find_repository", lambda: None)
    assert torchrec.continue_in_peer("ladder", []) is None
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "benchmarks/peers/torchrec: left out" in said
    assert not torchrec.has_torchrec()


@pytest.mark.parametrize(
    ("old", "new"),
    {
        ".venv/bin/python benchmarks/bench_balance.py --x": "freescale bench balance --x",
        "torchrun --nproc-per-node 4 benchmarks/bench_priority_gpu.py --turns 8": (
            "freescale bench staged --device cuda --nproc 4 --turns 8"
        ),
        "freescale bench snapshot --nproc 4": "freescale bench checkpoint snapshots --nproc 4",
        "freescale bench snapshot restore": "freescale bench checkpoint restore",
        "torchrun --nproc-per-node 4 benchmarks/bench_balance_measured.py --device cuda": (
            "freescale bench balance measured --nproc 4 --device cuda"
        ),
        "python3 benchmarks/bench_ladder_gpu.py --nproc 4": (
            "freescale bench ladder --device cuda --nproc 4"
        ),
        "freescale bench ladder --repetitions 20": "freescale bench ladder --repetitions 20",
    }.items(),
)
def test_the_command_of_an_earlier_result_is_shown_as_it_is_today(old, new):
    assert results.update_command(old) == new


def test_names_of_earlier_results_are_read_as_todays(tmp_path):
    row = {"arm": "full, dense by parts", "options": {"dense_sums": "parts"}}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"command": "x", "rows": [row, {"arm": "serial"}], "claims": []}))
    full, serial = results.read_result(path)["rows"]
    assert full == {"arm": "full, dense partitioned", "options": {"dense_sums": "partitioned"}}
    assert serial == {"arm": "serial"}
