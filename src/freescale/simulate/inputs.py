"""Builds cluster, model and batches from the options of `freescale simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freescale.config import RunConfig, SimulateConfig
from freescale.data.batches.loader import Histories
from freescale.data.batches.negatives import choose_negatives
from freescale.data.features.sources import get_request
from freescale.embedding.dynamic_rules import Dynamic, parse_dynamic
from freescale.simulate.compute import Model, load_calibration
from freescale.simulate.generated_workload import GeneratedWorkload, PooledFeatures
from freescale.simulate.network import Network, load_network, load_preset
from freescale.simulate.recorded_workload import RecordedWorkload
from freescale.simulate.simulator import Cluster
from freescale.simulate.workload import Workload
from freescale.train.build import (
    adopt_choices,
    build_encoder,
    build_specs,
    load_features,
    prepare_data,
)
from freescale.visible import Visible

_LONGEST = 21_000  # history that training takes (DataConfig.max_length)


def build_cluster(config: SimulateConfig, gpus: int, trained: RunConfig | None = None) -> Cluster:
    """Builds the cluster of the options. `trained`: the settings of training, if the batches come
    from a file. ValueError if it cannot be simulated."""
    network = load_network(config.network) if config.network else load_preset(config.preset)
    network.check_ranks(gpus)
    return place_on_network(config, gpus, network, config.calibration, trained)


def place_on_network(
    config: SimulateConfig,
    gpus: int,
    network: Network,
    calibration: str | None,
    trained: RunConfig | None,
) -> Cluster:
    curve = load_calibration(calibration or network.calibration)
    model = build_model(config, network, trained)
    curve.find_shape(model)
    return Cluster(model, curve, network, gpus, config.jitter, config.split_histories)


def build_model(config: SimulateConfig, network: Network, trained: RunConfig | None) -> Model:
    """Builds the model of the options; that of a run has the dense parameters of its module."""
    usual = "bf16" if network.device == "cuda" else "fp32"
    shape = (config.width, config.layers, config.heads)
    visible = Visible.parse(config.attend) if config.attend else None
    if trained is None:
        return Model(*shape, usual, config.cap, row_optimizer=config.row_optimizer, visible=visible)
    precision, data = trained.train.precision, trained.data
    heads = len(trained.label_names) * (config.width + 1)
    if trained.model.head == "dlrm":
        raise ValueError("runs with --head dlrm cannot be simulated yet: describe a workload")
    dense = heads + sum(parameter.numel() for parameter in build_encoder(trained).parameters())
    negatives = choose_negatives(data.negatives, data.negatives_per)
    features, prefix = load_features(trained, prepare_data(trained)), 0
    if features is not None:
        dense += config.width * sum(features.vector_widths)
        prefix = len(features.user_places)
    return Model(
        *shape,
        usual if precision == "auto" or network.device == "cpu" else precision,
        config.cap,
        dense=dense,
        row_optimizer=config.row_optimizer,
        negatives=negatives if trained.model.task == "retrieval" else 0,
        entry_bytes=2 if trained.train.wire_precision == "bf16" else 4,
        prefix=prefix,
        visible=visible,
    )


def describe_training(config: SimulateConfig, base: RunConfig | None = None) -> RunConfig | None:
    """The settings of training that correspond to the options; None if batches are generated.
    `base`: the settings of a run, which the options change. ValueError if the data does not exist,
    or an option is out of range."""
    if not config.data:
        return None
    if config.cap > _LONGEST:
        raise ValueError(
            f"--cap must be at most {_LONGEST} with --data, as training takes it; got {config.cap}"
        )
    plain = "*" not in config.data and "://" not in config.data
    if base is not None and plain and not Path(config.data).exists():
        raise ValueError(
            f"{config.data}: the run's data is not there; name it with --data, or go to the folder "
            "in which the run was started"
        )
    names = ("data", "cache", "width", "layers", "heads", "attend")
    given = {name: getattr(config, name) for name in names}
    if config.rows:
        given |= {"rows": config.rows, "in_batch_share": 1.0}  # a dynamic table has no others
    given |= {"max_length": config.cap, "row_optimizer": config.row_optimizer, "seed": config.seed}
    trained = RunConfig.from_settings(given, base)
    if trained.data.order == "time":
        raise ValueError(
            "the run trains in order of time (--order time), and the simulator reads batches of "
            "users; simulate the file itself, with --data and without --run"
        )
    samples = Histories(prepare_data(trained), 1, **build_specs(trained))
    return adopt_choices(trained, samples.negatives)


def build_workload(config: SimulateConfig, gpus: int, trained: RunConfig | None = None) -> Workload:
    """Builds the batches of the options: from a file as training reads it, or generated."""
    samples = config.batch * gpus
    if trained is not None:
        if config.pooled_features:
            raise ValueError(
                "--pooled-features belong to generated batches: leave out --data and --run"
            )
        return read_workload(trained, samples)
    pooled = None
    if config.pooled_features:
        shape = (config.pooled_features, config.pooled_ids, config.pooled_rows)
        pooled = PooledFeatures(*shape, config.popularity)
    names = ("median", "sigma", "cap", "items", "popularity", "seed")
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    collisions = None if config.natural else config.collisions
    return GeneratedWorkload(samples, **options, collisions=collisions, pooled=pooled)


def read_workload(trained: RunConfig, samples: int) -> RecordedWorkload:
    """Reads the batches of training with these settings, `samples` in each."""
    path = prepare_data(trained)
    features = load_features(trained, path)
    specs = build_specs(trained, features=features)
    return RecordedWorkload(path, samples, name=trained.data.data, features=features, **specs)


def find_dynamic(config: SimulateConfig) -> Dynamic | None:
    """The rules of the item table if it is dynamic. ValueError if --rows is not valid."""
    if not config.rows:
        return None
    parts = dict(part.strip().partition("=")[::2] for part in config.rows.split(","))
    rules = {name: parse_dynamic(choice) for name, choice in parts.items()}
    if None in rules.values():
        raise ValueError(f"--rows {config.rows}: give the item table as item=dynamic:50M")
    return rules.get("item")


def list_omissions(trained: RunConfig | None) -> list[str]:
    """Lists settings of a run that the simulator ignores."""
    if trained is None:
        return []
    left = {
        "SASRec (simulated with the compute of HSTU)": trained.model.encoder == "sasrec",
        "micro-batches": trained.train.accumulate > 1,
        "recomputed activations": trained.model.recompute,
        "sums of the rows of features": bool(get_request(trained.data)),
        "tables on a disk (simulated as host memory)": "disk:" in trained.train.placement,
    }
    found = [name for name, used in left.items() if used]
    return [f"NOT SIMULATED: {', '.join(found)}"] if found else []
