"""How busy a device is: from intervals of a profile to the report."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from freescale_bench.common.device_profile import read_profile
from helpers.report_cases import run_folder

from freescale.config import TrainConfig
from freescale.report.page import render_page
from freescale.report.runs import read_runs
from freescale.train.device_figures import DeviceFigures, choose_first_step


def event(name: str, begin_ms: float, duration_ms: float, device: str = "CUDA") -> SimpleNamespace:
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: int(begin_ms * 1e6),
        duration_ns=lambda: int(duration_ms * 1e6),
        device_type=lambda: f"DeviceType.{device}",
    )


def make_profiler(*events: SimpleNamespace) -> SimpleNamespace:
    results = SimpleNamespace(events=lambda: list(events))
    return SimpleNamespace(
        profiler=SimpleNamespace(kineto_results=results), start=lambda: None, stop=lambda: None
    )


PROFILE = make_profiler(
    event("gemm", 0.0, 2.0),
    event("attention", 1.0, 2.0),  # beside it, on another stream
    event("freescale/forward", 0.0, 9.0),  # a label
    event("Memcpy HtoD", 5.0, 1.0),
    event("gemm", 8.0, 1.0),
    event("aten::mm", 0.0, 9.0, "CPU"),
)


def test_busy_is_the_union_of_kernels_and_copies():
    found = read_profile(PROFILE, steps=2, wall_ms=10.0)
    assert (found.busy, found.wall) == (pytest.approx(2.5), 5.0)
    assert (found.kernels, found.copies) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("done", "total", "steps", "first"),
    [(0, 1000, 5, 20), (300, 1000, 5, 320), (0, 12, 5, 7), (0, 5, 5, None), (0, 1000, 0, None)],
)
def test_which_steps_are_profiled(done, total, steps, first):
    assert choose_first_step(done, total, steps) == first
    if first is not None:
        assert first + steps <= total


def test_a_gpu_run_has_a_line_with_its_figures(tmp_path, monkeypatch):
    """Everything but the device."""
    monkeypatch.setattr("torch.profiler.profile", lambda activities: PROFILE)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    compiled = ["gather_kernel(rows: *i32)", "scatter_kernel(rows: *i64)"]
    monkeypatch.setattr(
        "freescale.train.device_figures.watch_compilations", lambda: lambda: compiled
    )
    transport = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    trainer = SimpleNamespace(rank=0, step=0, total=12, folder=tmp_path, transport=transport)
    figures = DeviceFigures(steps=2)
    figures.on_start(trainer)
    for step in range(1, 13):
        figures.on_step(trainer, SimpleNamespace(step=step))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry["step"] == 12 and entry["launches"] == 1.5 and entry["compilations"] == 2
    assert entry["compiled"] == compiled
    assert 0 < entry["device_busy"] <= 1


def test_cpu_runs_and_other_ranks_profile_nothing(tmp_path):
    for rank, device in ((0, "cpu"), (1, "cuda")):
        transport = SimpleNamespace(device=SimpleNamespace(type=device))
        trainer = SimpleNamespace(rank=rank, step=0, total=99, folder=tmp_path, transport=transport)
        figures = DeviceFigures(TrainConfig.profile_steps)
        figures.on_start(trainer)
        for step in range(1, 40):
            figures.on_step(trainer, SimpleNamespace(step=step))
    assert not list(tmp_path.iterdir())


def test_the_report_shows_them_where_a_run_has_them(tmp_path):
    plain, profiled = run_folder(tmp_path / "cpu"), run_folder(tmp_path / "gpu")
    with open(profiled / "metrics.jsonl", "a") as file:
        line = {"step": 3, "device_busy": 0.925, "launches": 151.4, "compilations": 0}
        file.write(json.dumps(line) + "\n")
    assert "device busy" not in render_page(read_runs([plain]))
    page = render_page(read_runs([profiled]))
    for name, value in (
        ("device busy", "92%"),
        ("kernels launched a step", "151"),
        ("compilations after step 1", "0"),
    ):
        assert re.search(rf">{name}(</span>)?</dt><dd>{value}</dd>", page), name
