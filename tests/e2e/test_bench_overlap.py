"""`freescale bench overlap` on two CPU ranks, and the starting of a benchmark's ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from freescale_bench.common.ranks import share_gpu, start_ranks
from freescale_bench.overlap.bench import make_figures, make_notes
from freescale_bench.overlap.overlapped import FULL
from helpers.command import freescale

ROOT = Path(__file__).resolve().parents[2]


def overlap(*arguments):
    return freescale("bench", "overlap", *arguments, PYTHONPATH=str(ROOT / "src"))


@pytest.mark.long
def test_every_arm_is_measured(tmp_path):
    output = tmp_path / "overlap.json"
    done = overlap("--device", "cpu", "--nproc", 2, "--output", output)
    assert done.returncode == 0, done.stderr
    assert (
        str(output) in done.stdout
        and "skipped, needs a GPU" in done.stdout
        and "throughput is done" in done.stderr
    )
    result = json.loads(output.read_text())
    assert {"machine", "versions", "settings", "rows", "figures", "date"} <= set(result) and result[
        "ranks"
    ] == 2
    measured = {(row["group"], row["arm"]) for row in result["rows"]}
    beside = {
        (part, arm) for part in ("products", "layer") for arm in ("alone", "hostwire", FULL, "gloo")
    }
    alone = {("alone", arm) for arm in ("gloo", "hostwire", "hostwire, two in flight")}
    copies = {
        f"{whose} {way}"
        for whose in ("plain copies", "hostwire's copies")
        for way in ("device to host", "host to device")
    }
    sent = {
        f"{arm}{more}"
        for arm in ("hostwire", "hostwire over gloo", "hostwire over tcp")
        for more in ("", ", two in flight")
    }
    throughput = {
        ("throughput", arm) for arm in copies | sent | {"plain copies both ways", "gloo alone"}
    }
    assert measured == beside | alone | throughput | {("witness", "hostwire")}
    for row in result["rows"]:
        assert "skipped" in row or row["ms"]["median"] > 0, row
        assert all(
            row[name] > 0 for name in ("rate", "ceiling_percent", "messages") if name in row
        ), row
    # slow-downs, copies, messages: what is skipped has no figure
    assert len(result["figures"]) == 4 + 2 + 6


def test_nowhere_to_write(tmp_path):
    nowhere = overlap("--device", "cpu", "--output", tmp_path / "no" / "file.json")
    assert (
        nowhere.returncode == 1
        and "no folder" in nowhere.stderr
        and "Traceback" not in nowhere.stderr
    )


def test_a_rank_that_fails_ends_the_run(tmp_path, capfd):
    """Here all do: their folder is missing."""
    status = start_ranks(
        "overlap",
        ["--device", "cpu", "--output", str(tmp_path / "no" / "file")],
        2,
        "cpu",
        180,
    )
    assert status == 1 and "no folder" in capfd.readouterr().err


def test_the_time_of_a_run_is_bounded(tmp_path):
    with pytest.raises(TimeoutError, match="its limit"):
        start_ranks(
            "overlap",
            ["--device", "cpu", "--output", str(tmp_path / "file")],
            2,
            "cpu",
            0.3,
        )


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
    assert log.read_text().split() == ["begin", pipe, "quit", pipe] and not Path(pipe).exists()


def test_without_mps_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control"), share_gpu(4):
        pass


def test_figures_take_the_worst_and_nccl_at_its_best():
    slowed = [("hostwire", 0.5), (FULL, 2.0), ("nccl, at most 1 channel", 4.0), ("nccl", 9.0)]
    rows = [
        {"group": "products", "case": "a", "arm": arm, "slower_percent": value}
        for arm, value in slowed
    ]
    rows += [
        {"group": "layer", "case": "b", "arm": arm, "slower_percent": value + 1}
        for arm, value in slowed
    ]
    rows.append(
        {
            "group": "throughput",
            "case": "x",
            "arm": "hostwire's copies device to host",
            "ceiling_percent": 90.0,
        }
    )
    held = {"arrived_meanwhile": True, "arrived_after_it": False, "kernel_ms": 400.0}
    rows.append({"group": "witness", "case": "y", "arm": "hostwire", "right": False, **held})
    found = make_figures(rows)
    assert found[f"{FULL}, most slow-down, %"] == 3.0
    assert (
        found["hostwire, most slow-down, %"] == 1.5
        and found[("collective at its best, most slow-down, %")] == 5.0
    )
    assert found["copies device to host, worst % of plain"] == 90.0
    assert found["witness, hostwire"] == 0.0  # what arrived was wrong
    assert any("a: least slowed by nccl, at most 1 channel" in text for text in make_notes(rows))
