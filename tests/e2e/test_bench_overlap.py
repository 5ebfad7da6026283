"""`freescale bench overlap` on two CPU ranks, and the starting of a benchmark's ranks."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from freescale_bench.common import ranks
from freescale_bench.common.ranks import share_gpu, start_ranks
from freescale_bench.overlap.bench import make_best_rows, make_figures
from freescale_bench.overlap.overlapped import FULL
from helpers.command import freescale

ROOT = Path(__file__).resolve().parents[2]
CARRIED = {"messages": 3, "messages_ms": 9.0, "rate": 1.0, "unit": "GB/s"}


def overlap(*arguments):
    return freescale("bench", "overlap", *arguments, PYTHONPATH=str(ROOT / "src"))


@pytest.mark.long
def test_every_arm_is_measured(tmp_path):
    done = overlap("--device", "cpu", "--nproc", 2, "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing is written" in done.stdout and "skipped, needs a GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    best = [row for row in rows if row["group"] == "best setting of nccl"]
    rows = [row for row in rows if row not in best]
    beside = {
        (part, arm) for part in ("products", "layer") for arm in ("alone", "hostwire", FULL, "gloo")
    }
    assert {(row["group"], row["arm"]) for row in rows} == beside | {("witness", "hostwire")}
    assert {row["case"] for row in best} == {row["case"] for row in rows if "slower_percent" in row}
    for row in rows:
        assert "skipped" in row or row["ms"]["median"] > 0, row
    # the slow-downs: what is skipped has no figure
    assert len(make_figures(rows)) == 2


def test_a_rank_that_fails_ends_the_run(capfd):
    """Here all do: they are told to measure too few steps."""
    arguments = ["step", "--device", "cpu", "--nproc", "2", "--steps", "1"]
    status = start_ranks("dynamic", arguments, 2, "cpu", 180)
    assert status == 1 and "--steps must be at least 10" in capfd.readouterr().err


def test_the_time_of_a_run_is_bounded():
    with pytest.raises(TimeoutError, match="its limit"):
        start_ranks("overlap", ["--device", "cpu"], 2, "cpu", 0.3)


def test_mps_ends_with_the_run(tmp_path, monkeypatch):
    """A stand-in for its control program writes down how it was called."""
    log, control = tmp_path / "log", tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo begin; else cat; fi >> {log}\nls -d '
        f'"$CUDA_MPS_PIPE_DIRECTORY" >> {log}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="a rank"), share_gpu(4) as environment:
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        raise RuntimeError("a rank failed")
    pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
    words = ["begin", pipe, "get_server_list", pipe, "quit", "-t", "10", pipe]
    assert log.read_text().split() == words and not Path(pipe).exists()


def test_servers_that_mps_leaves_over_are_ended(tmp_path, monkeypatch):
    """A stand-in for the control program starts one, and a daemon that never answers."""
    control, server = (tmp_path / f"nvidia-cuda-mps-{name}" for name in ("control", "server"))
    shutil.copy(shutil.which("sleep"), server)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ranks, "MPS_SECONDS", 0.3)
    for answer, expected in (("true", nullcontext()), ("false", pytest.raises(ValueError))):
        control.write_text(
            f'#!/bin/sh\nif [ "$1" = -d ]; then {server} 60 & echo $! > {tmp_path}/pid\n'
            "until grep -q mps-server /proc/$!/cmdline; do :; done\n"  # a shell until then
            f"else {answer}; fi\n"
        )
        control.chmod(0o755)
        with expected, share_gpu(2):
            assert _runs(int((tmp_path / "pid").read_text()))
        assert not _runs(int((tmp_path / "pid").read_text()))


def _runs(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_without_mps_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control"), share_gpu(4):
        pass


def test_figures_take_the_worst_and_nccl_at_its_best():
    slowed = [("hostwire", 0.5), (FULL, 2.0), ("nccl, at most 1 channel", 4.0), ("nccl", 9.0)]
    rows = [
        {"group": "products", "case": "a", "arm": arm, "slower_percent": value, **CARRIED}
        for arm, value in slowed
    ]
    rows += [
        {"group": "layer", "case": "b", "arm": arm, "slower_percent": value + 1, **CARRIED}
        for arm, value in slowed
    ]
    held = {"arrived_meanwhile": True, "arrived_after_it": False, "kernel_ms": 400.0}
    rows.append({"group": "witness", "case": "y", "arm": "hostwire", "right": False, **held})
    found = make_figures(rows)
    assert found[f"{FULL}, most slow-down, %"] == 3.0
    assert found["hostwire, most slow-down, %"] == 1.5
    assert found["witness, hostwire"] == 0.0  # what arrived was wrong
    best = list(make_best_rows(rows))
    assert [(row["case"], row["arm"], row["slower_percent"]) for row in best] == [
        ("a", "nccl, at most 1 channel", 4.0),
        ("b", "nccl, at most 1 channel", 5.0),
    ]
