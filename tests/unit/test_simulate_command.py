"""The command, its files, calibrations: what is shipped loads, what does not fit is refused or
marked."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from click.testing import CliRunner
from freescale_bench.simulate.calibrate import calibrate, fit_shape

from freescale.cli.main import main
from freescale.config import SimulateConfig
from freescale.data.synthetic.generate import generate
from freescale.simulate.compute import CALIBRATIONS, Model, load_calibration, parse_calibration
from freescale.simulate.network import list_names
from freescale.simulate.run import run_simulation


def simulated(*arguments: str):
    return CliRunner().invoke(main, ["simulate", *arguments], catch_exceptions=False)


def test_the_command_shows_what_each_technique_gives(tmp_path):
    done = simulated(
        "--gpus", "8", "--gpus", "16", "--steps", "4", "--batch", "8", "--out", str(tmp_path)
    )
    assert done.exit_code == 0, done.output
    for words in (
        "8 GPUs",
        "TorchRec SparseDist, ids deduplicated",
        "stale + balancing + hostwire",
        "x TorchRec",
        "twice the batch",
        "straggler % / exposed %",
        "measured by",
        "On 16 H100s FreeScale trains this",
    ):
        assert words in done.output
    folder = tmp_path / "16-staged-balancing-hostwire"
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["ranks"] == 16 and ledger["measured_steps"] == 2
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 4
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        lanes = {event["tid"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"}
    assert lanes == {0, 1, 2, 3, 4}  # compute, communication, ahead, urgent, input
    assert len(json.loads((tmp_path / "simulate.json").read_text())["rows"]) == 20


def test_one_configuration_with_the_users_own_data(tmp_path):
    path = tmp_path / "histories.parquet"
    generate(path, users=200, items=3000, median=40.0, cap=300)
    done = simulated(
        "--gpus", "8", "--steps", "4", "--batch", "8", "--data", str(path), "--schedule", "staged"
    )
    assert done.exit_code == 0, done.output
    assert (
        "as given" in done.output
        and "where a step's time went" in done.output
        and "rows: of all ids" in done.output
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("--gpus", "12"), "12 GPUs do not fill nodes of 8", id="nodes not full"),
        pytest.param(
            ("--width", "321"), "--width 321 is not a multiple of --heads 4", id="no such model"
        ),
        pytest.param(("--preset", "mars"), "unknown preset 'mars'", id="unknown preset"),
        pytest.param(("--calibration", "mars"), "no such calibration", id="unknown calibration"),
        pytest.param(("--steps", "1"), "--steps must be at least 3", id="too few steps"),
        pytest.param(
            ("--balance", "nobody"), "unknown partitioner 'nobody'", id="unknown partitioner"
        ),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    given = dict(zip(arguments[::2], arguments[1::2]))
    done = simulated(
        *(
            word
            for pair in ({"--gpus": "8", "--steps": "3", "--batch": "4"} | given).items()
            for word in pair
        )
    )
    assert done.exit_code == 1 and words in done.output and "Traceback" not in done.output


def test_presets_can_be_listed():
    assert "InfiniBand" in simulated("--preset", "list").output


def test_longer_histories_than_were_measured_are_marked():
    config = SimulateConfig(cap=30_000, median=9000.0, batch=4, steps=3)
    assert any("EXTRAPOLATED" in note for note in run_simulation(config, [8])["notes"])
    assert not any(
        "EXTRAPOLATED" in note
        for note in run_simulation(SimulateConfig(batch=4, steps=3), [8])["notes"]
    )


@pytest.mark.parametrize(("width", "marked"), [(512, False), (320, False), (64, True)])
def test_any_model_shape_is_simulated(width, marked):
    """The defaults of training are narrower than what was measured."""
    config = SimulateConfig(width=width, layers=2, heads=2, batch=4, steps=3)
    data = run_simulation(config, [8])
    assert any(f"EXTRAPOLATED: width {width}" in note for note in data["notes"]) == marked
    assert min(row["step_ms"] for row in data["rows"]) > 0


def test_natural_collisions_are_those_of_the_popularity():
    rates = [
        run_simulation(
            SimulateConfig(batch=4, steps=4, items=1_000_000, natural=natural, schedule="serial"),
            [8],
        )["rows"][0]["collision_percent"]
        for natural in (False, True)
    ]
    assert rates[0] == pytest.approx(10, abs=2) and rates[1] > 20


def test_shipped_calibrations_load():
    names = list_names(CALIBRATIONS, ".json")
    assert {"h200", "testbed-a", "testbed-c", "this-machine"} <= set(names)
    for name in names:
        found = load_calibration(name)
        assert found.source and found.date
        shape = found.shapes[0]
        assert found.find_shape(Model(shape.width, 1, shape.heads, shape.precision)) == shape


def test_a_file_that_is_no_calibration_is_refused(tmp_path):
    path = tmp_path / "some.json"
    for content in ("{}", "[]", "no json", '{"shapes": [{"width": 1}]}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="not a calibration"):
            load_calibration(path)


def test_a_fit_finds_the_curve_and_nothing_negative():
    random = np.random.default_rng(0)
    rows = []
    for _ in range(12):
        lengths = random.integers(10, 1000, 20).astype(float)
        sums = {
            "squares": (lengths**2).sum(),
            "tokens": lengths.sum(),
            "samples": len(lengths),
            "longest": 1000,
            "layers": 2,
        }
        ms = 2 * 1e3 * (3e-9 * sums["squares"] + 2e-6 * sums["tokens"])
        rows.append(
            sums
            | {
                "forward_ms": ms,
                "backward_ms": 2 * ms,
                "head_forward_ms": 0.0,
                "head_backward_ms": 0.0,
            }
        )
    shape = fit_shape(rows, 64, 2, "fp32")
    assert shape["forward"]["quadratic"] == pytest.approx(3e-9, rel=0.01)
    assert shape["backward"]["linear"] == pytest.approx(4e-6, rel=0.01)
    assert min(shape["forward"].values()) >= 0 and shape["forward_error_percent"]["largest"] < 1


def test_calibrating_gives_a_file_that_can_be_simulated(monkeypatch):
    import freescale_bench.simulate.calibrate as module

    small = {
        "equal": [(8, 2), (16, 2), (32, 2), (32, 4)],
        "jagged": [(16, 32, 4)],
        "keys": 200,
        "table": 1000,
        "parameters": 1000,
        "shapes": [(16, 2)],
    }
    monkeypatch.setitem(module.CASES, "cpu", small)
    data = json.loads(json.dumps(calibrate("cpu", "small", repetitions=2)))
    assert len(data["measured"]) == 5 and data["machine"]["torch"]
    assert parse_calibration(data).find_shape(Model(16, 1, 2, "fp32")).longest == 32
    with pytest.raises(ValueError, match="width 15 is not a multiple"):
        calibrate("cpu", "bad", shapes=[(15, 2)])
    with pytest.raises(ValueError, match="not one of"):
        calibrate("abacus", "bad")
    help = simulated("calibrate", "--help").output
    assert "simulate calibrate [OPTIONS]" in help and "WIDTH:HEADS" in help
    wrong = simulated("calibrate", "--device", "cpu", "--out", "x.json", "--shape", "64")
    assert wrong.exit_code == 1 and "--shape '64' is not WIDTH:HEADS" in wrong.stderr
