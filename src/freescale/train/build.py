"""Builds the parts of a run from its configuration: data, model, optimizer, pipeline. Every rank
builds the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from freescale.config import DataConfig, RunConfig
from freescale.data.batches.loader import Histories
from freescale.data.batches.specs import Features, NegativeSpec, ReadSpec, SampleSpec, SplitSpec
from freescale.data.features.prepare import prepare_features
from freescale.data.features.sources import list_event_columns, refuse_leaks
from freescale.data.features.store import FOLDER, FeatureStore
from freescale.data.ingest.ids import VOCABULARY, find_vocabulary, read_known
from freescale.data.ingest.prepare import prepare
from freescale.data.stream.stream import FIRST, STREAM
from freescale.data.workspace import Progress
from freescale.embedding.dynamic_rules import Dynamic, parse_dynamic
from freescale.embedding.optimizers import RowOptimizer, choose_row_optimizer
from freescale.embedding.parallelize import parallelize
from freescale.embedding.sharded_model import ShardedModel
from freescale.folders import find_cache_folder
from freescale.models.dlrm import DlrmHSTU, DlrmRanking
from freescale.models.encoder import Encoder
from freescale.models.features import FeatureTables
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.models.sasrec import SASRec
from freescale.pipeline.dense.local import AdamW
from freescale.pipeline.pipeline import Pipeline
from freescale.stores.path import as_path, is_store
from freescale.train.build_balancer import build_balancer, count_extra_work
from freescale.train.evaluate import evaluate_ranking
from freescale.train.evaluate_retrieval import evaluate_retrieval
from freescale.train.learning_rate import build_learning_rate
from freescale.train.sample_ranks import SampleRanks
from freescale.train.time_order import find_split, find_windows
from freescale.transport.api import Transport


def prepare_data(config: RunConfig, progress: Progress | None = None) -> Path:
    """Returns the histories file of the data, from the cache or made now. One process of a machine
    makes it; the others wait. `progress` is called with a stage and the share done."""
    data = config.data
    return prepare(
        data.data,
        as_path(data.cache) if data.cache else find_cache(config.data),
        data.format,
        data.num_items,
        progress,
        columns=data.columns,
        labels=config.model.labels if config.model.task == "ranking" else "",
        missing=data.missing,
        any_ids="item" in config.dynamic_tables,
        vocabulary=data.vocabulary,
        events=list_event_columns(data, find_cache(config.data)),
        known=read_known(Path(config.origin.kept) / VOCABULARY) if config.origin else None,
    )


def find_run_vocabulary(histories: Path, features: Features | None) -> Path | None:
    """The vocabulary of a run's data: of the histories, or with further items of --items."""
    own = None if features is None else features.vocabulary
    return own or find_vocabulary(histories)


def find_cache(data: DataConfig) -> Path:
    """The folder of prepared data on this machine."""
    cache = data.cache
    return Path(cache) if cache and not is_store(cache) else find_cache_folder()


def load_features(
    config: RunConfig, histories: Path, trained: Path | None = None
) -> FeatureStore | None:
    """Opens the features of the items and events, made now if they are not in the cache; None
    without features. `trained`: the folder of the run whose statistics count; None: fitted to these
    histories."""
    statistics = None if trained is None else trained / FOLDER
    if statistics is not None and not statistics.is_dir():
        return None
    values = [histories.parent / VOCABULARY] if config.data.follow is not None else []
    if values and trained is not None:  # whose categories come first
        values.insert(0, trained / STREAM / FIRST / VOCABULARY)
    store = prepare_features(
        config.data,
        histories,
        find_cache(config.data),
        find_split(config, histories, fits=True),
        any_ids="item" in config.dynamic_tables,
        trained=statistics,
        continued=None if config.origin is None else Path(config.origin.kept) / FOLDER,
        values=values,
    )
    if store is not None:
        columns = {label.column for label in config.labels}
        refuse_leaks([each.feature for each in store.context], config.model.task, columns)
    share = config.data.id_dropout
    if share and (store is None or not store.item_rows):
        raise ValueError(
            f"--id-dropout {share:g} needs features of items, which describe those whose ids drop "
            "out: give --items, or leave it out"
        )
    if store is not None:
        store.drop_ids(share, config.train.seed)
    return store


def load_histories(
    config: RunConfig,
    path: Path,
    transport: Transport,
    part: str = "train",
    trained: Path | None = None,
    window: int | None = None,
) -> Histories:
    """Opens one rank's data of a part of the split. `trained`: as of `load_features`. `window`: in
    order of time, the one that is evaluated; None: that of the test part."""
    train, features = config.train, load_features(config, path, trained)
    specs = build_specs(config, part, features)
    if config.data.order == "time":
        specs |= find_windows(config, path, find_cache(config.data), part, window)
    return Histories(
        path,
        train.global_batch if part == "train" else train.eval_batch,
        rank=transport.rank,
        world=transport.world,
        features=features,
        **specs,
    )


def build_specs(
    config: RunConfig, part: str = "train", features: FeatureStore | None = None
) -> dict[str, Any]:
    """The specs of `Histories` for a part of the split and its features, as keywords."""
    data, training = config.data, part == "train"
    since = config.origin.since if config.origin is not None and training else None
    return {
        "sample": SampleSpec(
            config.model.task, config.label_names, data.max_length, data.candidates
        ),
        "split": SplitSpec(data.split, data.split_time, part, since),
        "negatives": NegativeSpec(
            data.negatives,
            data.negatives_per,
            data.negatives_from,
            data.popularity_power,
            data.in_batch_share,
            data.log_q,
        ),
        "read": ReadSpec(
            seed=config.train.seed,
            shuffle=data.shuffle and training,
            epochs=config.train.epochs if training else 1,
            num_items=features.num_items if features and not features.any_ids else data.num_items,
            least_items=config.known_rows.get("item", 0),
            any_ids="item" in config.dynamic_tables,
        ),
    }


def adopt_choices(config: RunConfig, chosen: NegativeSpec) -> RunConfig:
    """Replaces `auto` in the configuration by the negatives that `Histories` chose."""
    data = replace(
        config.data,
        negatives=chosen.count,
        negatives_per=chosen.per,
        negatives_from=chosen.source,
        log_q=chosen.log_q,
    )
    return replace(config, data=data)


def build_module(
    config: RunConfig, num_items: int, num_actions: int, features: FeatureTables | None = None
) -> nn.Module:
    """Builds the model as a plain module. Its tables are on the meta device until `parallelize`."""
    model = config.model
    torch.manual_seed(config.train.seed)
    tables = features or FeatureTables()
    encoder = build_encoder(config, tables.context_places)
    sizes: dict[str, Any] = {
        "num_items": num_items,
        "num_actions": num_actions,
        "feature_tables": tables,
        "table_device": "meta",
    }
    if isinstance(encoder, DlrmHSTU):
        return build_dlrm(config, encoder, **sizes)
    if model.task == "ranking":
        return Ranking(encoder, tasks=config.label_names, **sizes)
    return Retrieval(encoder, temperature=model.temperature, **sizes)


def build_encoder(config: RunConfig, context: int = 0) -> Encoder:
    """Builds the encoder of `--encoder` and its options. `context`: places of a request's features,
    which are tokens with --head dlrm."""
    model = config.model
    shared: dict[str, Any] = {
        "width": model.width,
        "layers": model.layers,
        "heads": model.heads,
        "max_length": config.data.max_length
        + (config.data.candidates if model.task == "ranking" else 0),
        "dropout": model.dropout,
        "input_dropout": model.input_dropout,
        "input_scale": model.input_scale,
        "checkpoint": model.recompute,
        "visible": model.visible,
    }
    if model.encoder == "sasrec":
        return SASRec(**shared, hidden=model.hidden)
    if model.head == "dlrm":
        return build_dlrm_encoder(config, context, **shared)
    shared |= {"position_bias": model.position_bias, "time_bias": model.time_bias}
    return HSTU(**shared)


def size_tables(features: Features) -> FeatureTables:
    """The tables of features, without vectors."""
    rows = features.item_rows, features.event_rows, features.user_rows
    return FeatureTables(
        *rows,
        features.user_places,
        context=features.context_rows,
        item_places=features.item_places,
        context_places=features.context_places,
    )


def build_model(config: RunConfig, data: Histories, transport: Transport) -> ShardedModel:
    """Builds the module and spreads its tables over the ranks."""
    train = config.train
    # a dynamic table has no rows before its ids arrive
    tables = None
    if data.features is not None:
        tables = replace(size_tables(data.features), vectors=data.features.load_vectors())
    actions = max(data.num_actions, config.known_rows.get("action", 0))
    if "action" in config.dynamic_tables:  # ids of actions have no bound
        actions = min(actions, 1)
    module = build_module(config, max(1, data.num_items), actions, tables)
    return parallelize(
        module,
        module.features,  # type: ignore[arg-type]
        build_row_optimizer(config),
        transport=transport,
        tables=parse_tables(config),
        placement=config.placements,
        init_std=choose_row_std(config),
        seed=train.seed,
        row_clip=train.row_clip,
        wire_dtype=torch.bfloat16 if train.wire_precision == "bf16" else None,
        exchange=train.exchange,
    )


def parse_tables(config: RunConfig) -> dict[str, Dynamic]:
    """Parses --rows for `parallelize`. ValueError if it is not valid."""
    tables = {}
    for name, choice in config.dynamic_tables.items():
        try:
            rules = parse_dynamic(choice)
        except ValueError as error:
            raise ValueError(f"--rows {name}={choice}: {error}") from None
        if rules is None:
            raise ValueError(f"--rows {name}={choice}: give dynamic:ROWS, as in {name}=dynamic:50M")
        if name == "item" and config.model.task == "retrieval" and config.data.log_q is not False:
            rules = replace(rules, draws="targets")  # in-batch negatives are drawn from
        tables[name] = rules
    return tables


def choose_row_std(config: RunConfig) -> float:
    """The standard deviation of initial row values."""
    model = config.model
    return model.width**-0.5 if model.row_std is None else model.row_std


def build_row_optimizer(config: RunConfig) -> RowOptimizer:
    """Builds the optimizer of all table rows."""
    return choose_row_optimizer(config.train)


def build_optimizer(config: RunConfig, model: ShardedModel) -> torch.optim.Optimizer:
    """Builds the optimizer of the dense parameters. One call updates all of them: a small model has
    many, and each takes almost no time."""
    train = config.train
    return AdamW(
        model.dense_parameters(),
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
    )


def build_pipeline(
    config: RunConfig, model: ShardedModel, optimizer: torch.optim.Optimizer, total: int
) -> Pipeline:
    """Builds the pipeline of a run of `total` steps."""
    train = config.train
    return Pipeline(
        model,
        optimizer,
        schedule=train.schedule,
        accumulate=train.accumulate,
        clip=train.clip,
        precision=train.precision,
        learning_rate=build_learning_rate(train.warmup, train.decay, total),
        balance=build_balancer(config, model.transport.device, *count_extra_work(model.module)),
        dense_sums=train.dense_sums,
        task_weights=config.task_weights,
    )


def evaluate_part(
    config: RunConfig,
    model: ShardedModel,
    path: Path,
    part: str,
    baseline: bool = False,
    keep: SampleRanks | None = None,
    trained: Path | None = None,
    window: int | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of the model on a part of the split. A collective; the same on all ranks.

    Args:
        config: the run's settings.
        model: the result of `build_model`.
        path: the histories file.
        part: `validation` or `test`.
        baseline: whether to evaluate the popularity baseline too (retrieval).
        keep: receives the target's rank for each sample (retrieval).
        trained: as of `load_features`.
        window: as of `load_histories`. The baseline then counts all events before it.

    Returns:
        {"model": {metric: value}, "popularity": {metric: value}}
    """
    data = load_histories(config, path, model.transport, part, trained, window)
    if config.model.task == "ranking":
        return evaluate_ranking(model, data, config.label_names)
    if keep is not None:
        keep.rows = data.find_rows()
    training = data if data.time is not None else None
    if baseline and training is None:
        training = load_histories(config, path, model.transport, trained=trained)
    popularity = training.count_items_of if baseline and training is not None else None
    return evaluate_retrieval(model, data, popularity=popularity, keep=keep, features=data.features)


def build_dlrm_encoder(config: RunConfig, context: int, **shared: Any) -> DlrmHSTU:
    """Builds the encoder of a model with `context` tokens. `shared`: options of every encoder."""
    if context and config.data.candidates > 1:
        raise ValueError(
            f"--candidates {config.data.candidates} with --head dlrm and features of requests: "
            "their tokens stand before the history, so that a sample has one request; give "
            "--candidates 1"
        )
    model, longest = config.model, shared.pop("max_length") + context
    return DlrmHSTU(
        context=context,
        positions=model.positions or longest + context + 1,
        time_buckets=model.time_buckets,
        max_length=longest,
        **shared,
    )


def build_dlrm(config: RunConfig, encoder: DlrmHSTU, **sizes: Any) -> DlrmRanking:
    """Builds the head around an encoder. `sizes`: of its tables."""
    model = config.model
    return DlrmRanking(
        encoder,
        tasks=config.label_names,
        input_hidden=model.input_hidden or max(1, model.width // 2),
        head_hidden=model.head_hidden or model.width,
        **sizes,
    )
