"""The plan of DLRMv4 on clusters, by numbers that are computed here by hand."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from freescale.cli.main import main
from freescale.config import RunConfig, SimulateConfig
from freescale.simulate import plan
from freescale.simulate.plan import (
    count_flops,
    count_sample_bytes,
    count_table_bytes,
    list_tables,
    plan_recipe,
)

QUICK = SimulateConfig(recipe="dlrm-v4", steps=3)


@pytest.fixture(scope="module")
def recipe():
    return RunConfig.from_settings({"data": "-", "recipe": "dlrm-v4"})


@pytest.fixture(scope="module")
def plans():
    found = plan_recipe(QUICK, (8, 16), ("paper", "h200"))
    return {(one.gpu, one.gpus): one for one in found}


def test_operations_are_those_of_mlperf(recipe):
    """S = 4096, D = H d = 512: 3.5*2*(S^2/2)*2D + 3*2*S*D*4D + 3*2*S*3D*D, times 3."""
    attention = 3 * 7 * (4096**2 / 2) * 1024
    uvqk, output = 3 * 6 * 4096 * 512 * 2048, 3 * 6 * 4096 * 1536 * 512
    assert [round(each / 1e9, 1) for each in (attention, uvqk, output)] == [180.4, 77.3, 58.0]
    assert count_flops(recipe) == attention + uvqk + output
    assert round(count_flops(recipe) / 1e9, 1) == 315.7


def test_tables_are_cut_by_rows(recipe):
    specs = list_tables(recipe)
    assert [spec.rows for spec in specs] == [9_390_624, 4_661_090, 279_000_003]
    # rows of an eighth of each, rounded up; 512 numbers of 4 bytes and one of the optimizer
    blocks = 1_173_828 + 582_637 + 34_875_001
    assert count_table_bytes(recipe, specs, 8) == blocks * (2048 + 4) == 75_167_768_232
    assert 8 * count_table_bytes(recipe, specs, 8) / 1e9 == pytest.approx(601.3, abs=0.1)
    # 2,838 tokens of width 512: 11 numbers of 2 bytes in 3 layers, and 2 of 4 bytes
    assert count_sample_bytes(recipe) == 2838 * 512 * (11 * 2 * 3 + 8) == 107_526_144


def test_memory_decides_what_fits_and_the_micro_batches(plans):
    small = plans["H100", 8]
    assert not small.fits and small.tables_gb > small.room_gb == 72.0  # 90 % of 80 GB
    # 16 H100: 72 - 37.6 GB for activations are 320 samples of 512; 8 H200: 51 GB are 481 of 1,024
    assert [plans[key].micro_batches for key in (("H100", 16), ("H200", 8), ("H200", 16))] == [
        *(2, 3, 1)
    ]
    for one in plans.values():
        assert one.batch * one.gpus == 8192 and (not one.fits or one.memory_gb < one.room_gb)
    assert plans["H200", 8].memory_gb == pytest.approx(75.17 + 342 * 0.1075 + 0.1, abs=0.1)


def test_time_is_that_of_the_curve_and_the_exchanges(plans):
    one, samples, tokens = plans["H200", 8], 1024, 2838
    quadratic, linear = 1.919e-12 + 6.212e-12, 1.4 * (8.736e-9 + 1.547e-8)  # of the h200 curve
    compute = 3 * samples * (quadratic * tokens**2 + linear * tokens + 8.4e-6) + 3 * 1.56e-3
    assert compute < one.step_ms / 1e3 < 1.6 * compute
    assert one.samples_per_second == pytest.approx(8192 / (one.step_ms / 1e3), rel=1e-3)
    assert one.hours == pytest.approx(69.3e6 / one.samples_per_second / 3600)
    assert one.tflops == pytest.approx(one.samples_per_second * 0.3157 / 8, rel=1e-3)
    twice = plans["H200", 16]
    assert one.samples_per_second < twice.samples_per_second < 2.1 * one.samples_per_second
    assert plans["H100", 16].samples_per_second < twice.samples_per_second  # slower links


def test_the_command_prints_a_prediction_and_writes_it(tmp_path):
    arguments = ["simulate", "--recipe", "dlrm-v4", "--steps", "3", "--preset", "h200"]
    done = CliRunner().invoke(main, [*arguments, "--gpus", "8", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for words in ("8 x H200", "PREDICTED, not measured", "315.7 GFLOP", "75.2"):
        assert words in done.output
    (found,) = json.loads((tmp_path / "plan.json").read_text())
    assert found["gpus"] == 8 and found["hours"] > 0
    everywhere = CliRunner().invoke(main, arguments[:5])
    for count in (8, 16, 32, 64):
        for gpu in ("H100", "H200"):
            assert f"{count} x {gpu}" in everywhere.output
    assert "does not fit" in everywhere.output


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tables take 75.2 GB on each of 8 H100, and 72.0 GB"):
        plan_recipe(QUICK, (8,), ("paper",))
    with pytest.raises(ValueError, match="recipe hstu-small: the sizes of its tables follow from"):
        plan_recipe(SimulateConfig(recipe="hstu-small"), (8,), ("h200",))
    with pytest.raises(ValueError, match="memory_gb, of a GPU, is missing"):
        plan_recipe(QUICK, (2,), ("this-machine",))
    wrong = CliRunner().invoke(main, ["simulate", "--recipe", "dlrm-v4", "--width", "64"])
    assert wrong.exit_code and "--recipe dlrm-v4 has no --width" in wrong.output
    assert plan.GPUS == (8, 16, 32, 64)
