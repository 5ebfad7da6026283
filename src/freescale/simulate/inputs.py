"""Makes what is simulated from the options of `freescale simulate`: cluster, model and batches."""

from __future__ import annotations

from pathlib import Path

from freescale.config import RunConfig, SimulateConfig
from freescale.data.batches.loader import Histories
from freescale.data.batches.negatives import choose_negatives
from freescale.embedding.dynamic_rules import Dynamic, parse_dynamic
from freescale.simulate.compute import Model, load_calibration
from freescale.simulate.generated_workload import GeneratedWorkload, PooledFeatures
from freescale.simulate.network import Network, load_network, load_preset
from freescale.simulate.recorded_workload import RecordedWorkload
from freescale.simulate.simulator import Cluster
from freescale.simulate.workload import Workload
from freescale.train.build import adopt_choices, build_encoder, list_sample_options, prepare_data

_LONGEST = 21_000  # history that training takes (DataConfig.max_length)


def build_cluster(config: SimulateConfig, gpus: int, trained: RunConfig | None = None) -> Cluster:
    """Makes the cluster that options describe.

    Args:
        config: The options.
        gpus: How many.
        trained: The settings of training, where the batches are of a file.

    Raises:
        ValueError: It cannot be simulated.
    """
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
    return Cluster(model, curve, network, gpus, config.jitter)


def build_model(config: SimulateConfig, network: Network, trained: RunConfig | None) -> Model:
    """The model of the options. That of a run has the dense parameters of its module."""
    usual = "bf16" if network.device == "cuda" else "fp32"
    shape = (config.width, config.layers, config.heads)
    if trained is None:
        return Model(*shape, usual, config.cap, row_optimizer=config.row_optimizer)
    asked = trained.train.precision
    judged = len(trained.label_names) * (config.width + 1)
    dense = judged + sum(parameter.numel() for parameter in build_encoder(trained).parameters())
    retrieval = trained.model.task == "retrieval"
    return Model(
        *shape,
        usual if asked == "auto" or network.device == "cpu" else asked,
        config.cap,
        dense=dense,
        row_optimizer=config.row_optimizer,
        negatives=choose_negatives(trained.data.negatives, trained.data.negatives_per)
        if retrieval
        else 0,
        entry_bytes=2 if trained.train.wire_precision == "bf16" else 4,
    )


def describe_training(config: SimulateConfig, base: RunConfig | None = None) -> RunConfig | None:
    """The settings of training that the options stand for; None where batches are generated.

    Args:
        config: The options.
        base: The settings of a run, which the options change.

    Raises:
        ValueError: The data is not there, or an option is out of range.
    """
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
    given = {name: getattr(config, name) for name in ("data", "cache", "width", "layers", "heads")}
    if config.rows:
        given |= {"rows": config.rows, "in_batch_share": 1.0}  # negatives that such a table has
    given |= {"max_length": config.cap, "row_optimizer": config.row_optimizer, "seed": config.seed}
    trained = RunConfig.from_settings(given, base)
    samples = Histories(prepare_data(trained), 1, **list_sample_options(trained))
    return adopt_choices(trained, samples)


def build_workload(config: SimulateConfig, gpus: int, trained: RunConfig | None = None) -> Workload:
    """Makes the batches that options describe: of a file as training reads it, or generated."""
    samples = config.batch * gpus
    if trained is not None:
        if config.pooled_features:
            raise ValueError(
                "--pooled-features belong to generated batches: leave out --data and --run"
            )
        return read_workload(trained, samples)
    shape = {"median": config.median, "sigma": config.sigma, "cap": config.cap}
    ids = {
        "items": config.items,
        "popularity": config.popularity,
        "collisions": None if config.natural else config.collisions,
    }
    pooled = (
        PooledFeatures(
            config.pooled_features, config.pooled_ids, config.pooled_rows, config.popularity
        )
        if config.pooled_features
        else None
    )
    return GeneratedWorkload(samples, **shape, **ids, seed=config.seed, pooled=pooled)  # type: ignore[arg-type]


def read_workload(trained: RunConfig, samples: int) -> RecordedWorkload:
    """The batches that training with these settings reads, `samples` in each."""
    options = list_sample_options(trained)
    return RecordedWorkload(
        prepare_data(trained),
        samples,
        cap=options.pop("max_length"),
        name=trained.data.data,
        shuffle=trained.data.shuffle,
        **options,
    )


def find_dynamic(config: SimulateConfig) -> Dynamic | None:
    """The rules of the item table, if its rows come and go. ValueError for what cannot be read."""
    if not config.rows:
        return None
    parts = dict(part.strip().partition("=")[::2] for part in config.rows.split(","))
    rules = {name: parse_dynamic(choice) for name, choice in parts.items()}
    if None in rules.values():
        raise ValueError(f"--rows {config.rows}: give the item table as item=dynamic:50M")
    return rules.get("item")


def list_omissions(trained: RunConfig | None) -> list[str]:
    """Settings of a run that the simulator does not know."""
    if trained is None:
        return []
    left = {
        "SASRec (the compute of HSTU stands for it)": trained.model.encoder == "sasrec",
        "segments (histories are simulated whole)": trained.model.segment is not None,
        "micro-batches": trained.train.accumulate > 1,
        "compressed dense gradients": trained.train.compress_dense is not None,
        "recomputed activations": trained.model.recompute,
        "tables on a disk (host memory stands for it)": "disk:" in trained.train.placement,
    }
    found = [name for name, used in left.items() if used]
    return [f"NOT SIMULATED: {', '.join(found)}"] if found else []
