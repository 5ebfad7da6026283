"""`freescale.torchrec.parallelize`: replaces a model's EmbeddingCollections and
EmbeddingBagCollections by readers of sharded tables; the model's code does not change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from freescale.config import TrainConfig
from freescale.embedding.optimizers import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from freescale.embedding.parallelize import has_hooks
from freescale.embedding.parallelize import parallelize as parallelize_embeddings
from freescale.embedding.placement import Wanted
from freescale.torchrec.batches import BatchForm
from freescale.torchrec.readers import BagCollectionReader, CollectionReader
from freescale.torchrec.sharded_model import ShardedModel, SummedLoss
from freescale.transport.api import Transport

_SHARDED, _REPLICATED, _BY_TABLE = "row_wise", "data_parallel", "table_wise"


# defaults of fused kernels
_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
# by class name: our row optimizer, and the common options
_KNOWN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "SGD": (SGD, ("lr",)),
    "Adagrad": (Adagrad, ("lr", "eps")),
    "RowWiseAdagrad": (RowWiseAdagrad, ("lr", "eps")),
    "Adam": (Adam, ("lr", "betas", "eps")),
}


def find_row_optimizer(table: str, weight: Tensor) -> RowOptimizer | None:
    """The row optimizer that `apply_optimizer_in_backward` gave to a table's weight, or None.
    ValueError if there is no such row optimizer here."""
    classes = getattr(weight, "_optimizer_classes", ())
    if not classes:
        return None
    (kind, *more), options = classes, dict(weight._optimizer_kwargs[0])  # type: ignore[attr-defined]
    if more or kind.__name__ not in _KNOWN:
        names = ", ".join(each.__name__ for each in classes)
        raise ValueError(
            f"table {table!r} has {names} by apply_optimizer_in_backward; rows are updated by one "
            f"of {', '.join(_KNOWN)}: give row_optimizer="
        )
    ours, known = _KNOWN[kind.__name__]
    strange = {name: value for name, value in options.items() if name not in known and value}
    if strange:
        raise ValueError(
            f"table {table!r} has {kind.__name__} with {strange}, which row optimizers do not "
            "have: give row_optimizer="
        )
    options = {name: value for name, value in (_DEFAULTS | options).items() if name in known}
    made: RowOptimizer = ours(**options)
    return made


def read_placements(plan: Any, tables: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """The placement of each table in a ShardingPlan, or its dict {module: {table:
    ParameterSharding}}. `tables`: (module, table, its name here). ValueError for a kind of sharding
    that is not supported here."""
    modules = getattr(plan, "plan", plan)
    known = {module for module, *_ in tables}
    unknown = [module for module in modules if module not in known]
    if unknown:
        raise ValueError(
            f"the plan names module {unknown[0]!r}; the model's collections are "
            f"{', '.join(sorted(known))}"
        )
    placements = {}
    for module, table, name in tables:
        parameter = dict(modules.get(module, {})).get(table)
        if parameter is None:
            continue
        kind = parameter.sharding_type
        if kind == _BY_TABLE:
            print(f"table {table}: table_wise in the plan, sharded by row here", flush=True)
        elif kind not in (_SHARDED, _REPLICATED):
            raise ValueError(
                f"the plan shards table {table!r} of {module!r} {kind}, which is not supported: "
                f"tables are {_SHARDED}, or {_REPLICATED}"
            )
        placements[name] = "replicated" if kind == _REPLICATED else "sharded"
    return placements


@dataclass(frozen=True)
class _Table:
    collection: str  # path of the module
    path: str  # of the embedding in it
    config: Any
    embedding: Any  # nn.Embedding or nn.EmbeddingBag


def parallelize(
    model: nn.Module,
    row_optimizer: RowOptimizer | Mapping[str, RowOptimizer] | None = None,
    *,
    transport: Transport | None = None,
    plan: Any = None,
    placement: Wanted | Mapping[str, Wanted] = TrainConfig.placement,
    seed: int = TrainConfig.seed,
    row_clip: float | None = None,
    wire_dtype: torch.dtype | None = None,
    exchange: str = TrainConfig.exchange,
    shared: Sequence[str] = (),
    loss_weight: str | Callable[[Any], Tensor] | None = None,
) -> ShardedModel:
    """Lets a model's EmbeddingCollection and EmbeddingBagCollection modules read tables that are
    spread over all ranks. Tables, features and pooling are those of their configs. Changes `model`
    in place and moves it to the transport's device. A collective.

    Args:
        model: `forward(batch)` returns the mean loss over the samples, or (loss, outputs). Its
            batches are dataclasses, named tuples, dicts, lists or tuples of KeyedJaggedTensor,
            JaggedTensor and tensors [samples, ...].
        row_optimizer: `SGD`, `Adagrad`, `RowWiseAdagrad` or `Adam` of freescale: one for all
            tables, or one for each by the name of its config. None: that of
            `apply_optimizer_in_backward`, or else Adam.
        transport: the result of `freescale.connect`. None: this process alone.
        plan: a sharding plan of TorchRec. Row-wise tables are sharded, data-parallel ones
            replicated, table-wise ones sharded by row with a message. `placement` places all other
            tables.
        placement: "auto", "sharded", "replicated", `freescale.Host(cache="8GB")` or
            `freescale.Disk(folder, cache="8GB")`, for all tables or by name.
        seed: for rows of tables on the meta device. They are drawn with the standard deviation of
            their config's uniform distribution, as a function of (seed, table, row).
        row_clip: largest norm of a row's gradient; None does not clip.
        wire_dtype: torch.bfloat16 rounds rows and gradients in messages between ranks.
        exchange: "auto", "flat" or "two-level", as of `freescale.parallelize`.
        shared: paths of tensors that belong to the batch as a whole.
        loss_weight: weight of each sample in the mean loss: the path of a tensor [samples], or a
            function from a batch to one. None: all samples weigh the same.

    Returns:
        The model; its tables are allocated before the first step, evaluation or load.

    Raises:
        TypeError: `row_optimizer` is not one of freescale's.
        ValueError: the model has an unsupported part, or names do not match; the message names it.
    """
    refuse_unsupported(model)
    tables = _find_tables(model)
    if not tables:
        raise ValueError(
            "the model has no EmbeddingCollection and no EmbeddingBagCollection: "
            "freescale.parallelize takes models with nn.Embedding"
        )
    placements = _name_in_full(placement, tables, "placement")
    if plan is not None:
        chosen = read_placements(plan, [(t.collection, t.config.name, t.path) for t in tables])
        by_hand = isinstance(placements, Mapping)
        rest = {t.path: "auto" if by_hand else placements for t in tables}
        placements = rest | chosen | (dict(placements) if by_hand else {})
    form = BatchForm(shared, loss_weight)
    collections = {table.collection: model.get_submodule(table.collection) for table in tables}
    drawn = _find_deviations(tables)
    sharded = parallelize_embeddings(
        model,
        {table.path: table.config.feature_names for table in tables},
        _choose_optimizers(row_optimizer, tables),
        transport=transport,
        placement=placements,
        init_std=drawn or None,
        seed=seed,
        row_clip=row_clip,
        wire_dtype=wire_dtype,
        exchange=exchange,
    )
    readers: dict[int, nn.Module] = {}
    for path, collection in collections.items():
        names = [table.path for table in tables if table.collection == path]
        pools = isinstance(collection, EmbeddingBagCollection)
        kind = BagCollectionReader if pools else CollectionReader
        readers[id(collection)] = kind(collection, sharded.tables, names, form)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and id(module) in readers:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, readers[id(module)])
    model = readers.get(id(model), model)
    return ShardedModel(SummedLoss(model, form), sharded.tables)


def _find_tables(model: nn.Module) -> list[_Table]:
    tables = []
    for path, module in model.named_modules():
        if not isinstance(module, COLLECTIONS):
            continue
        field = "embedding_bags" if isinstance(module, EmbeddingBagCollection) else "embeddings"
        for config in list_configs(module):
            name = ".".join(part for part in (path, field, config.name) if part)
            tables.append(_Table(path, name, config, getattr(module, field)[config.name]))
    return tables


def _name_in_full(value: Any, tables: Sequence[_Table], what: str) -> Any:
    """Replaces the names of configs in a user's mapping by paths of embeddings."""
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for given, one in value.items():
        paths = [t.path for t in tables if given in (t.path, t.config.name)]
        if len(paths) != 1:
            known = ", ".join(t.config.name for t in tables)
            which = f"is no table; the tables are {known}"
            if paths:
                which = f"is the name of {len(paths)} tables ({', '.join(paths)})"
            raise ValueError(f"{what} names {given!r}, which {which}")
        found[paths[0]] = one
    return found


def _choose_optimizers(given: Any, tables: Sequence[_Table]) -> Any:
    if given is not None:
        return _name_in_full(given, tables, "row_optimizer")
    found = {t.path: find_row_optimizer(t.config.name, t.embedding.weight) for t in tables}
    without = [t.config.name for t in tables if found[t.path] is None]
    if len(without) == len(tables):
        return None
    if without:
        raise ValueError(
            f"apply_optimizer_in_backward was called for some tables, but not for "
            f"{', '.join(without)}: call it for all, or give row_optimizer="
        )
    return found


def _find_deviations(tables: Sequence[_Table]) -> dict[str, float]:
    """Standard deviations of initial rows; empty if all tables have weights."""
    if not any(t.embedding.weight.is_meta for t in tables):
        return {}
    found = {}
    for table in tables:
        config, init = table.config, table.config.init_fn
        usual = isinstance(init, functools.partial) and init.func is nn.init.uniform_
        if table.embedding.weight.is_meta and not usual:
            raise ValueError(
                f"table {config.name!r} is on the meta device and has an init_fn of its own, which "
                "would not be called: make it on the CPU, or leave init_fn out"
            )
        width = config.get_weight_init_max() - config.get_weight_init_min()
        found[table.path] = width / math.sqrt(12)
    return found


# By the name of a class or base class: the problem and the fix.
_REFUSED = {
    "ManagedCollisionCollection": "managed collision is not supported: hash ids in the data",
    "ManagedCollisionModule": "managed collision is not supported: hash ids in the data",
    "BaseManagedCollisionEmbeddingCollection": (
        "managed collision is not supported: use the plain collection, and hash ids in the data"
    ),
    "GenericITEPModule": "pruning in training is not supported: use the plain collection",
    "DistributedModelParallel": "it is sharded already: give the model itself",
    "ShardedModule": "it is sharded already: give the model before TorchRec sharded it",
    "FusedEmbeddingBagCollection": (
        "fused collections are not supported: use EmbeddingBagCollection and row_optimizer="
    ),
    "FusedEmbeddingCollection": (
        "fused collections are not supported: use EmbeddingCollection and row_optimizer="
    ),
}
COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


def refuse_unsupported(model: nn.Module) -> None:
    """Raises a ValueError that names the module or table."""
    for path, module in model.named_modules():
        names = [kind.__name__ for kind in type(module).__mro__]
        for name in names:
            if name in _REFUSED:
                _refuse(path, module, _REFUSED[name])
        if type(module).__module__.startswith("torchrec.quant"):
            _refuse(path, module, "quantized collections cannot be trained")
        if isinstance(module, COLLECTIONS):
            if type(module) not in COLLECTIONS:
                kind = next(kind for kind in COLLECTIONS if isinstance(module, kind))
                _refuse(path, module, f"it is derived from {kind.__name__}: use that itself")
            if has_hooks(module):
                _refuse(path, module, "it has hooks, which would be lost: put them on its parent")
            for config in list_configs(module):
                reason = _find_unsupported(config)
                if reason is not None:
                    raise ValueError(f"cannot shard table {config.name!r} of {path!r}: {reason}")


def list_configs(collection: nn.Module) -> list[Any]:
    """The tables of a collection."""
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    assert isinstance(collection, EmbeddingCollection)
    return list(collection.embedding_configs())


def _refuse(path: str, module: nn.Module, reason: str) -> None:
    raise ValueError(f"module {path or 'model'!r} is a {type(module).__name__}: {reason}")


def _find_unsupported(config: Any) -> str | None:
    if getattr(config, "use_virtual_table", False):
        return "virtual tables (use_virtual_table) are not supported: tables have a size"
    if config.num_embeddings_post_pruning is not None:
        return "pruned tables (num_embeddings_post_pruning) are not supported"
    if config.data_type != DataType.FP32:
        return (
            f"data_type {config.data_type.name} is not supported: tables are trained in FP32, and "
            "wire_dtype=torch.bfloat16 halves what travels"
        )
    return None
