"""One place for defaults: what a person gets on the command line is what a program gets that leaves
an option out."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import timedelta

import click
import pytest
import torch

from freescale import Pipeline, connect, parallelize
from freescale.balance.balancer import Balancer
from freescale.cli.main import main
from freescale.config import (
    DataConfig,
    GenerateConfig,
    ModelConfig,
    RunConfig,
    SimulateConfig,
    TrainConfig,
)
from freescale.data import (
    NegativeSpec,
    ReadSpec,
    SampleSpec,
    SplitSpec,
    generate,
    prepare,
    read_interactions,
)
from freescale.data.histories import HistoriesFile
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.tables import Tables
from freescale.ledger.collector import Collector
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.models.sasrec import SASRec
from freescale.pipeline.schedule import Schedule
from freescale.simulate.compute import Model
from freescale.simulate.generated_workload import GeneratedWorkload
from freescale.train.build import build_row_optimizer
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.choice import FORMER, TRANSPORTS
from freescale.transport.hostwire.transport import HostwireTransport

DATA = DataConfig(data="x")
TRAINING = (DataConfig, ModelConfig, TrainConfig)
OTHER_NAMES = {
    "checkpoint": "recompute",
    "cap": "balance_cap",
    "adapt": "balance_adapt",
    "kind": "split",
    "time": "split_time",
    "count": "negatives",
    "per": "negatives_per",
    "source": "negatives_from",
    "lr": "row_lr",  # of row optimizers
    "keep": "keep_checkpoints",
    "init_std": "row_std",
    "asynchronous": "async_checkpoints",
}
# Options that share a name and no meaning with a setting of the command line.
OTHER_THINGS = {
    (ReadSpec, "epochs"),  # of a loader: one pass, as of any iterable. A run passes its own number
    (parallelize, "row_optimizer"),  # an object: below
    (parallelize, "transport"),  # an object
    (Pipeline, "balance"),  # costs are the model's: the command line knows its own models
    (parallelize, "init_std"),  # as nn.Embedding draws: below
}
CALLABLES = [
    *(
        SampleSpec,
        SplitSpec,
        NegativeSpec,
        ReadSpec,
        HistoriesFile,
        prepare,
        read_interactions,
        HSTU,
        SASRec,
        Retrieval,
        Ranking,
        Balancer,
    ),
    *(
        Tables,
        parallelize,
        Pipeline,
        Schedule,
        Collector,
        Checkpoints,
        connect,
    ),
    *ROW_OPTIMIZERS.values(),
]


def options_with_defaults(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def settings(*kinds) -> dict:
    """Of settings as they are: some defaults follow from others."""
    return {entry.name: getattr(kind(), entry.name) for kind in kinds for entry in fields(kind)}


@pytest.mark.parametrize("function", CALLABLES, ids=lambda function: function.__name__)
def test_constructors_have_the_defaults_of_the_command_line(function):
    usual = settings(*TRAINING)
    for name, default in options_with_defaults(function).items():
        setting = OTHER_NAMES.get(name, name)
        if setting in usual and (function, name) not in OTHER_THINGS:
            assert default == usual[setting], (
                f"{function.__name__}({name}={default!r}), --{setting} {usual[setting]!r}"
            )


@pytest.mark.parametrize(
    ("kind", "function", "names"),
    [
        (GenerateConfig, generate, {}),
        (SimulateConfig, GeneratedWorkload, {}),
        (SimulateConfig, Model, {"longest": "cap"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_so_have_the_functions_behind_the_other_commands(kind, function, names):
    # a list, on the command line a text
    usual = settings(kind) | ({"labels": ()} if kind is GenerateConfig else {})
    compared = {
        name: default
        for name, default in options_with_defaults(function).items()
        if names.get(name, name) in usual
    }
    assert compared == {name: usual[names.get(name, name)] for name in compared} and compared


def test_defaults_that_are_objects_are_made_of_the_settings():
    assert options_with_defaults(HostwireTransport)["timeout"] == timedelta(
        seconds=TrainConfig.timeout
    )
    model = torch.nn.ModuleDict({"item": torch.nn.Embedding(3, 2)})
    tables = parallelize(model, {"item": ["history"]}).tables
    assert tables.optimizers == {"item": build_row_optimizer(RunConfig(DATA))}


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_row_optimizers_have_the_options_of_the_command_line(name):
    config = RunConfig(DATA, train=TrainConfig(row_optimizer=name))
    assert build_row_optimizer(config) == ROW_OPTIMIZERS[name]()


def test_drawn_rows_start_as_those_of_an_embedding():
    """The exception: an embedding on the meta device trains like the same one with values."""
    model = torch.nn.ModuleDict({"item": torch.nn.Embedding(2000, 8, device="meta")})
    tables = parallelize(model, {"item": ["history"]}).tables
    tables.place()
    assert tables.get_local_rows("item")[1].std().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        pytest.param("train", TRAINING, id="train"),
        pytest.param("generate", (GenerateConfig,), id="generate"),
        pytest.param("simulate", (SimulateConfig,), id="simulate"),
    ],
)
def test_the_command_line_has_no_defaults_of_its_own(command, kinds):
    options = {option.name: option.default for option in main.commands[command].params}
    assert set(options) >= set(settings(*kinds))
    assert {name for name in settings(*kinds) if options[name] is not None} == set()


def test_removed_values_are_accepted_and_not_shown():
    """Old configurations and command lines name them."""
    config = RunConfig(DATA, ModelConfig(), TrainConfig(transport="hostwire-gloo"))
    assert RunConfig.from_json(config.to_json()) == config
    command = main.commands["train"]
    (option,) = (entry for entry in command.params if entry.name == "transport")
    (setting,) = (entry for entry in fields(TrainConfig) if entry.name == "transport")
    assert setting.metadata["choices"] == TRANSPORTS
    assert set(setting.metadata["former_choices"]) == set(FORMER)
    assert option.type.convert("hostwire-gloo", option, None) == "hostwire-gloo"
    assert "hostwire-gloo" not in option.make_metavar(click.Context(command))
    with pytest.raises(click.BadParameter, match="'hostwire-tcp'"):
        option.type.convert("pigeon", option, None)
    with pytest.raises(ValueError, match="--transport must be one of auto, collective, hostwire-"):
        TrainConfig(transport="pigeon")
