"""`freescale simulate --run`: the run's own settings, batches and placement, beside what its ledger
measured; and the verdict."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from freescale.cli.main import main
from freescale.config import RunConfig, SimulateConfig
from freescale.data.batches.loader import Histories
from freescale.data.batches.specs import NegativeSpec, SampleSpec
from freescale.data.ingest.prepare import prepare
from freescale.simulate.inputs import (
    build_model,
    describe_training,
    list_omissions,
    list_settings,
    read_trained_run,
    read_workload,
)
from freescale.simulate.network import load_preset
from freescale.simulate.placed_tables import place_tables
from freescale.simulate.run import run_simulation
from freescale.simulate.verdict import ALL, BASE, GIVEN, UNBALANCED, write_verdict
from freescale.train.build import build_model as build_sharded
from freescale.transport.local import LocalTransport


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """Ratings of 60 users; their events have an action each."""
    path = tmp_path_factory.mktemp("simulated") / "ratings.csv"
    lines = [f"{u},{(u * 7 + e * e) % 300},{e % 5 + 1},{e}" for u in range(60) for e in range(20)]
    path.write_text("user_id,item_id,rating,timestamp\n" + "\n".join(lines) + "\n")
    return path


def make_run(folder, csv, ledger=None, **settings):
    config = RunConfig.from_settings(
        {"data": str(csv), "cache": str(folder), "global_batch": 16, "max_length": 30, **settings}
    )
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json())
    (folder / "ledger.json").write_text(json.dumps(ledger or {"ranks": 1, "measured_steps": 0}))
    return config


def simulate_run(folder, **given):
    settings = list_settings(read_trained_run(folder)) | {"steps": 4, "run": str(folder)} | given
    return run_simulation(SimulateConfig(**settings), [2])


def make_ledger(ranks: int) -> dict:
    """What a run of `ranks` ranks leaves, as far as it is read here."""
    kinds = {"counts": 1.0, "ids": 0.0, "rows": 0.0, "gradients": 5.0, "samples": 1.0, "dense": 9.0}
    machine = {"cpu": "abacus", "gpu": None, "ranks": list(range(ranks))}
    return {
        "ranks": ranks,
        "steps": 30,
        "measured_steps": 28,
        "step_ms": {"mean": 7.0, "median": 6.0},
        "straggler_percent": 2.0,
        "exposed_percent": 3.0,
        "collision_percent": None,
        "samples_per_second": 9.0,
        "exposed_ms": kinds,
        "imbalance": 1.0,
        "compute_ms_per_rank": [5.0] * ranks,
        "straggler_ms_per_rank": [0.1] * ranks,
        "bytes_per_step": kinds,
        "spans_ms": {"forward": 2.0, "backward": 3.0},
        "paths": {"samples": {"gloo": 1.0}},
        "machines": [machine],
    }


def test_the_runs_settings_are_taken_unless_given(tmp_path, csv):
    make_run(tmp_path / "run", csv, make_ledger(2), width=32, heads=4, row_optimizer="sgd")
    settings = list_settings(read_trained_run(tmp_path / "run"))
    assert (settings["width"], settings["heads"]) == (32, 4)
    assert (settings["batch"], settings["row_optimizer"], settings["cap"]) == (8, "sgd", 30)
    data = simulate_run(tmp_path / "run", width=64)
    assert data["config"]["width"] == 64 and data["config"]["batch"] == 8


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="replicated"),
        pytest.param({"row_optimizer": "sgd", "negatives": 1, "max_length": 3}, id="other rows"),
        pytest.param({"negatives_per": "batch"}, id="shared negatives"),
        pytest.param({"width": 512, "heads": 4}, id="wide"),
    ],
)
def test_tables_are_placed_as_training_places_them(tmp_path, csv, settings):
    """One rank: the same kind, bytes and share of rows as the trained model says."""
    config = make_run(tmp_path, csv, **settings)
    model = build_model(
        SimulateConfig(**list_settings(read_trained_run(tmp_path))), load_preset("paper"), config
    )
    placed = place_tables("auto", model, read_workload(config, 16), 1)
    path = prepare(config.data.data, tmp_path)
    data = Histories(
        path,
        16,
        sample=SampleSpec(max_length=config.data.max_length),
        negatives=NegativeSpec(config.data.negatives, config.data.negatives_per),
    )
    tables = build_sharded(config, data, LocalTransport()).tables
    tables.place(data.batch(0))
    assert placed.placements == tables.placements and set(placed.rows) == {"item", "action"}


def test_dense_parameters_are_those_of_the_module(tmp_path, csv):
    config = make_run(tmp_path, csv)
    model = build_model(
        SimulateConfig(**list_settings(read_trained_run(tmp_path))), load_preset("paper"), config
    )
    sharded = build_sharded(
        config, Histories(prepare(config.data.data, tmp_path), 16), LocalTransport()
    )
    assert model.parameters == sum(p.numel() for p in sharded.dense_parameters())


def test_the_run_itself_is_simulated_beside_what_was_measured(tmp_path, csv):
    run = tmp_path / "run"
    config = make_run(run, csv, make_ledger(2))
    data = simulate_run(run, steps=5)
    own = {row["figure"]: (row["simulated"], row["measured"]) for row in data["own"]["rows"]}
    assert data["own"]["ranks"] == 2 and own["step, ms"][1] == 7.0
    # replicated tables: one AllReduce of all rows and a mark for each, on two ranks
    histories = Histories(prepare(config.data.data, run), 16)
    rows = histories.num_items + histories.num_actions
    assert own["gradients, kB"][0] == pytest.approx(2 * rows * (64 * 4 + 4) / 1e3, rel=1e-3)
    assert any("abacus" in note for note in data["own"]["notes"])
    done = CliRunner().invoke(
        main, ["simulate", "--run", str(run), "--gpus", "2", "--steps", "3"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    for words in (
        "the run itself on its 2 ranks",
        "measured",
        "x TorchRec",
        "On 2 H100s FreeScale",
    ):
        assert words in done.output


def test_a_run_without_a_ledger_is_simulated_alone(tmp_path, csv):
    make_run(tmp_path / "run", csv)
    data = simulate_run(tmp_path / "run")
    assert data["own"] is None and len(data["rows"]) == 10 and data["config"]["batch"] == 16


def test_the_runs_own_configuration_is_an_arm_of_its_own(tmp_path, csv):
    make_run(tmp_path / "run", csv, balance="none", schedule="serial", placement="item=sharded")
    rows = {row["arm"]: row for row in simulate_run(tmp_path / "run", transport="hostwire")["rows"]}
    assert rows["serial + hostwire"]["placement"] == "sharded" and "as in the run" not in rows
    make_run(tmp_path / "run", csv, balance="fixed", schedule="serial")
    rows = {row["arm"]: row for row in simulate_run(tmp_path / "run", transport="hostwire")["rows"]}
    assert rows["as in the run"]["balance"] == "fixed" and rows[ALL]["balance"] == "fixed"


def test_what_is_not_simulated_is_said(tmp_path, csv):
    config = make_run(tmp_path / "run", csv, accumulate=2, recompute=True)
    (note,) = list_omissions(config)
    assert note.startswith("NOT SIMULATED") and "recomputed" in note and "micro-batches" in note
    assert note in simulate_run(tmp_path / "run")["notes"]


def test_mistakes_are_one_line(tmp_path, csv):
    def refuse(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["simulate", "--gpus", "2", *arguments])
        assert done.exit_code == 1 and "Traceback" not in done.output
        return done.output

    assert "no such folder" in refuse("--run", str(tmp_path / "none"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "ledger.json").write_text('{"ranks": 1, "measured_steps": 0}')
    assert "has no config.json" in refuse("--run", str(tmp_path / "own"))
    make_run(tmp_path / "moved", tmp_path / "gone.csv")
    assert "name it with --data" in refuse("--run", str(tmp_path / "moved"))
    with pytest.raises(ValueError, match="--cap must be at most 21000"):
        describe_training(SimulateConfig(data=str(csv), cap=30_000))


# ---- the verdict


def row(gpus: int, speed: float, straggler: float = 0.0, exposed: float = 0.0) -> dict:
    return {
        "gpus": gpus,
        "samples_per_second": speed,
        "step_ms": 5.0,
        "straggler_percent": straggler,
        "exposed_percent": exposed,
        "exposed_ms": {"rows": 1.0, "gradients": 2.0},
    }


CARDS = [
    {"arm": ALL, "change": "network cards twice as fast", "more_samples_per_second_percent": 12.34},
    {"arm": ALL, "change": "twice the batch", "more_samples_per_second_percent": 50.0},
    {"arm": "serial", "change": "PCIe twice as fast", "more_samples_per_second_percent": 90.0},
]


def test_the_verdict_says_how_much_faster_and_what_balancing_is_worth():
    rows = {
        BASE: row(256, 100.0),
        UNBALANCED: row(256, 130.0, 21.3),
        ALL: row(256, 160.0, 0.1, 2.0),
    }
    useless = [{**CARDS[0], "more_samples_per_second_percent": 0.2}]
    assert write_verdict(rows, useless, "H100") == (
        "On 256 H100s FreeScale trains this 1.60 times as fast as TorchRec's SparseDist; without "
        "balancing 1.30 times: stragglers cost 21 %. What limits it is compute, 98 % of the step: "
        "no faster network would give 1 % more."
    )


@pytest.mark.parametrize(
    ("best", "words"),
    [
        pytest.param(
            row(8, 160.0, 0.0, 30.0),
            "What limits it is communication, 30 % of the step, most of it gradients: network "
            "cards twice as fast would give 12.3 % more.",
            id="communication",
        ),
        pytest.param(
            row(8, 160.0, 25.0, 3.0),
            "What limits it is the slowest rank: the others wait 25 % of the step.",
            id="stragglers",
        ),
        pytest.param(
            row(8, 160.0, 0.0, 4.0),
            "What limits it is compute, 96 % of the step; network cards twice as fast would give "
            "12.3 % more.",
            id="compute",
        ),
    ],
)
def test_the_verdict_names_what_limits_the_step(best, words):
    rows = {BASE: row(8, 100.0), UNBALANCED: row(8, 159.9), ALL: best}
    said = write_verdict(rows, CARDS, "H100")
    assert said.endswith(words) and "balancing adds nothing here" in said


def test_one_gpu_and_one_configuration_have_a_verdict_too():
    alone = {BASE: row(1, 100.0), ALL: row(1, 200.0)}
    assert write_verdict(alone, [], "H200") == (
        "One H200 has nobody to wait for: a step takes 5.0 ms, 200 samples a second."
    )
    asked = write_verdict({GIVEN: row(8, 120.0), BASE: row(8, 100.0)}, [], "H200")
    assert asked.startswith("On 8 H200s this configuration trains 1.20 times as fast as")
    assert asked.endswith("What limits it is compute, 100 % of the step.")
