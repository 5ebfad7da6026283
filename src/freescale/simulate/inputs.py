"""Builds cluster, model and batches from the options of `freescale simulate`, and reads the run
that they may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freescale.config import RunConfig, SimulateConfig
from freescale.data.batches.loader import Histories
from freescale.data.batches.negatives import choose_negatives
from freescale.data.features.sources import get_request
from freescale.embedding.dynamic_rules import Dynamic, parse_dynamic
from freescale.embedding.host_tables.tiers import parse_tier
from freescale.report.runs import read_run
from freescale.simulate.compute import Model, load_calibration
from freescale.simulate.generated_workload import GeneratedWorkload, PooledFeatures
from freescale.simulate.network import Network, load_network, load_preset
from freescale.simulate.output import collect_run
from freescale.simulate.placed_tables import place_tables
from freescale.simulate.recorded_workload import RecordedWorkload
from freescale.simulate.simulator import Cluster, Setting, simulate
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
        "the two-level exchange": trained.train.exchange == "two-level",
        "micro-batches": trained.train.accumulate > 1,
        "recomputed activations": trained.model.recompute,
        "sums of the rows of features": bool(get_request(trained.data)),
        "tables on a disk (simulated as host memory)": "disk:" in trained.train.placement,
    }
    found = [name for name, used in left.items() if used]
    return [f"NOT SIMULATED: {', '.join(found)}"] if found else []


@dataclass(frozen=True)
class TrainedRun:
    """The settings and measurements of a run."""

    config: RunConfig
    ledger: Mapping[str, Any]  # ledger.json; empty if nothing was measured

    @property
    def ranks(self) -> int | None:
        """None without a ledger."""
        return self.ledger.get("ranks")

    @property
    def item_placement(self) -> str:
        wanted = self.config.placements
        item = wanted if isinstance(wanted, str) else wanted.get("item", "auto")
        return "host" if parse_tier(item) is not None else item

    @property
    def cache_miss(self) -> float:
        """Percent of a step's rows that the caches missed; 100 if not measured."""
        measured = self.ledger.get("cache_miss_percent")
        return 100.0 if measured is None else float(measured)

    @property
    def machines(self) -> list[Mapping[str, Any]]:
        """One without figures if they are not known."""
        return self.ledger.get("machines") or [{}]

    @property
    def carries_by_hostwire(self) -> bool:
        """Whether hostwire carried rows and gradients; if not measured, by the settings."""
        paths = self.ledger.get("paths", {})
        carriers = [path for kind in ("ids", "rows", "samples") for path in paths.get(kind, {})]
        paths = [*carriers, self.config.train.transport]
        return any(path.startswith("hostwire") for path in paths)

    def make_setting(self, transport: str) -> Setting:
        """The configuration of the run, over a transport of the simulator."""
        train = self.config.train
        adapt = train.balance_adapt and train.balance != "none"
        chosen = (train.schedule, train.balance, transport, adapt, self.item_placement)
        return Setting(*chosen, cache_miss=self.cache_miss)


def read_trained_run(folder: str | Path) -> TrainedRun:
    """Reads config.json and ledger.json. ValueError if the folder is not that of a run, or a file
    in it is damaged."""
    path = Path(folder)
    run = read_run(path)
    if not run.config:
        raise ValueError(
            f"{path} has no config.json, which says what was trained: name the folder of a run of "
            "`freescale train`"
        )
    return TrainedRun(RunConfig.read(path), run.ledger if run.measured else {})


def list_settings(run: TrainedRun) -> dict[str, Any]:
    """The options of `freescale simulate` that follow from the run. Each GPU has as many samples as
    a rank of the run."""
    data, model, train = run.config.data, run.config.model, run.config.train
    decided = {
        "data": data.data,
        "cache": data.cache,
        "cap": data.max_length,
        "width": model.width,
        "layers": model.layers,
        "heads": model.heads,
        "attend": model.attend,
        "batch": -(-train.global_batch // (run.ranks or 1)),
        "adapt": train.balance_adapt,
        "split_histories": train.split_histories,
        "placement": run.item_placement,
        "cache_miss": run.cache_miss,
        "rows": train.rows,
        "row_optimizer": train.row_optimizer,
        "seed": train.seed,
    }
    # Without balancing in the run, the techniques are shown with the default partitioner.
    return decided | ({} if train.balance == "none" else {"balance": train.balance})


def compare_with_run(run: TrainedRun, config: SimulateConfig) -> dict[str, Any] | None:
    """Simulates the run on its own ranks, to compare with the measurements of its ledger. Of the
    options only the GPUs' network, the calibration and the steps are used.

    Returns plain data: `ranks`, `notes`, and `rows` of figure, simulated and measured. None if
    nothing was measured, or the ranks are spread unevenly over machines.
    """
    if run.ranks is None:
        return None
    network = _choose_own_network(run, config)
    if network is None:
        return None
    names = ("cap", "width", "layers", "heads", "attend", "row_optimizer", "split_histories")
    decided = list_settings(run)
    shape = replace(config, **{name: decided[name] for name in names})
    calibration = None if network.device == "cpu" else config.calibration
    trained = replace(run.config, data=replace(run.config.data, data=config.data or ""))
    cluster = place_on_network(shape, run.ranks, network, calibration, trained)
    source = read_workload(trained, run.config.train.global_batch)
    source.shard_large_tables(cluster.model, run.ranks)
    setting = run.make_setting("hostwire" if run.carries_by_hostwire else "collective")
    steps = max(3, min(config.steps, int(run.ledger["steps"])))
    dynamic = find_dynamic(replace(config, rows=run.config.train.rows))
    tables = place_tables(
        setting.placement, cluster.model, source, run.ranks, setting.cache_miss, dynamic, steps
    )
    found = collect_run(simulate(setting, cluster, source, steps, tables=tables), run.ranks)
    return {
        "ranks": run.ranks,
        "notes": [
            f"simulated on: {network.about}",
            *cluster.calibration.list_notes(cluster.model, source.get_lengths(0)),
            *_compare_machines(run.machines[0], cluster.calibration.machine),
            *tables.describe(),
        ],
        "rows": list_compared_figures(found, run.ledger),
    }


def _choose_own_network(run: TrainedRun, config: SimulateConfig) -> Network | None:
    """The run's ranks on the links of the preset, or of a CPU machine."""
    counts = {len(machine.get("ranks", range(run.ranks or 1))) for machine in run.machines}
    if len(counts) > 1:
        return None
    preset = load_preset(config.preset if run.machines[0].get("gpu") else "this-machine")
    return replace(preset, gpus_per_node=counts.pop())


def _compare_machines(own: Mapping[str, Any], calibrated: Mapping[str, Any]) -> list[str]:
    """Warns if the curve was measured on another device than the run's."""
    kind = "gpu" if own.get("gpu") else "cpu"
    mine, theirs = own.get(kind), calibrated.get(kind)
    if not mine or mine == theirs:
        return []
    return [
        f"OTHER MACHINE: the run computed on {mine}, the curve was measured on {theirs}: compare "
        "bytes and shares, or measure a curve of your own with `freescale simulate calibrate`"
    ]


def list_compared_figures(
    simulated: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Mean figures of both ledgers: {"figure", "simulated", "measured"}; None if a step has no such
    figure."""
    rows = [
        ("step, ms", simulated["step_ms"]["mean"], measured["step_ms"]["mean"]),
        *(
            (f"{name}, ms", simulated["spans_ms"].get(name), measured.get("spans_ms", {}).get(name))
            for name in ("forward", "backward")
        ),
        ("straggler, %", simulated["straggler_percent"], measured["straggler_percent"]),
        ("exposed, %", simulated["exposed_percent"], measured["exposed_percent"]),
        ("collisions, %", simulated["collision_percent"], measured.get("collision_percent")),
    ]
    for kind, sent in measured.get("bytes_per_step", {}).items():
        rows.append((f"{kind}, kB", simulated["bytes_per_step"].get(kind, 0.0) / 1e3, sent / 1e3))
    return [{"figure": name, "simulated": a, "measured": b} for name, a, b in rows]
