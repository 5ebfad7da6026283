"""`parallelize`: finds a model's nn.Embedding and nn.EmbeddingBag modules and puts readers of
sharded tables in their place; the model's code stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from freescale.config import TrainConfig
from freescale.embedding.dynamic_rules import Dynamic
from freescale.embedding.layout import TableSpec
from freescale.embedding.optimizers import ROW_OPTIMIZERS, RowOptimizer
from freescale.embedding.placement import Wanted
from freescale.embedding.readers import POOLINGS, BagReader, TableReader
from freescale.embedding.replicas import (
    check_replicable,
    copy_dense_from_rank_zero,
    copy_from_rank_zero,
)
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.transport.api import Transport
from freescale.transport.local import LocalTransport

AnyEmbedding = nn.Embedding | nn.EmbeddingBag

_INITS = ("auto", "weights", "rows")
_USUAL_STD = 1.0  # torch's own of nn.Embedding


def parallelize(
    model: nn.Module,
    ids: Mapping[str, Sequence[str]],
    row_optimizer: RowOptimizer | Mapping[str, RowOptimizer] | None = None,
    *,
    transport: Transport | None = None,
    tables: Mapping[str, Dynamic] | None = None,
    placement: Wanted | Mapping[str, Wanted] = TrainConfig.placement,
    init: str = "auto",
    init_std: float | Mapping[str, float] | None = None,
    seed: int = TrainConfig.seed,
    row_clip: float | None = TrainConfig.row_clip,
    wire_dtype: torch.dtype | None = None,
    exchange: str = TrainConfig.exchange,
) -> ShardedModel:
    """Puts tables over all ranks in the place of a model's nn.Embedding and nn.EmbeddingBag
    modules. Changes `model` in place and moves it to the transport's device. A collective.

    Args:
        model: a plain module; `forward(batch)` returns a summed loss per task.
        ids: for each embedding to shard, by name or an unambiguous end of it, the batch features
            that it reads. Embeddings that are not named stay dense parameters.
        row_optimizer: `SGD`, `Adagrad`, `RowWiseAdagrad` or `Adam` of freescale: one for all
            tables, or one for each by name. None: Adam.
        transport: what `connect` returned. None: this process alone.
        tables: which tables are dynamic, by name: `Dynamic(capacity=50_000_000)`. Their ids are any
            int64, and the number of rows of the module counts for nothing.
        placement: "auto", "sharded", "replicated", `Host(cache="8GB")` or
            `Disk(folder, cache="8GB")`, for all tables or by name. The last two are sharded tables
            that need not fit into the memory of the device.
        init: where the first rows come from. "auto" keeps the weight of an embedding that has one
            and draws the rows of an embedding on the meta device, which needs no memory. "weights"
            keeps all weights, "rows" draws all rows. Weights that are kept are rank 0's. Drawn
            rows are a function of (seed, table, row), whatever the number of ranks.
        init_std: standard deviation of drawn rows, for all tables or by name; None: 1, as of
            nn.Embedding.
        seed: of drawn rows.
        row_clip: largest norm of a row's gradient; None does not clip.
        wire_dtype: rounds rows and gradients on their way between ranks, to torch.bfloat16.
        exchange: "two-level" sends a row across machines once per machine, "flat" once per rank
            that reads it. "auto": two-level from four ranks on each of several machines, without
            RDMA. A checkpoint keeps its own, because gradients are added in another order.

    Returns:
        The model, its tables not allocated yet: that happens before the first step, evaluation or
        load. Dense parameters and buffers are rank 0's, bit for bit.

    Raises:
        TypeError: `row_optimizer` is not one of freescale's.
        ValueError: a module cannot be sharded or replicated, a name is unknown, or the ranks have
            different models; the message names it.
    """
    transport = transport or LocalTransport()
    if init not in _INITS:
        raise ValueError(f"init must be one of {', '.join(_INITS)}, not {init!r}")
    given = _find_modules(model, ids)
    modules: dict[str, AnyEmbedding] = {name: model.get_submodule(name) for name in given}  # type: ignore[misc]
    dynamic = _find_dynamic(tables or {}, given, modules, init)
    _refuse_unsupported(model, modules, init)
    kept = {
        name: module.weight.detach()
        for name, module in modules.items()
        if init != "rows" and not module.weight.is_meta
    }
    if init_std is not None and len(kept) == len(modules):
        raise ValueError(
            f"init_std={init_std} has no effect: the embeddings ({', '.join(kept)}) have weights, "
            "which are kept; init='rows' draws their rows instead"
        )
    weights = {f"embedding {name!r}": (m.weight, name in kept) for name, m in modules.items()}
    check_replicable(model, weights, transport)
    copy_from_rank_zero(kept.values(), transport)
    specs = [
        TableSpec(
            name,
            dynamic[name].rows if name in dynamic else module.num_embeddings,
            module.embedding_dim,
            module.weight.dtype,
            tuple(ids[given[name]]),
            module.padding_idx,
            dynamic.get(name),
        )
        for name, module in modules.items()
    ]
    sharded = Tables(
        specs,
        _choose_optimizers(row_optimizer, list(modules)),
        transport,
        placement=placement,
        seed=seed,
        std=_by_table("init_std", _USUAL_STD if init_std is None else init_std, list(modules)),
        weights=kept,
        row_clip=row_clip,
        wire=wire_dtype,
        exchange=exchange,
    )
    readers = {id(modules[spec.name]): _make_reader(sharded, spec, modules) for spec in specs}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in readers:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, readers[id(module)])
    model.to(transport.device)
    copy_dense_from_rank_zero(model, transport)
    return ShardedModel(model, sharded)


def _find_dynamic(
    tables: Mapping[str, Dynamic],
    given: Mapping[str, str],
    modules: Mapping[str, AnyEmbedding],
    init: str,
) -> dict[str, Dynamic]:
    """By full module name."""
    names = {known: full for full, short in given.items() for known in (full, short)}
    found = {}
    for name, rules in tables.items():
        if name not in names:
            raise ValueError(f"tables names {name!r}; the tables are {', '.join(given.values())}")
        if not isinstance(rules, Dynamic):
            raise ValueError(f"tables[{name!r}] is {rules!r}: give freescale.Dynamic(capacity=...)")
        if init == "weights" or (init == "auto" and not modules[names[name]].weight.is_meta):
            raise ValueError(
                f"table {name!r} is dynamic and draws its rows, so the weight of its embedding "
                "would be lost: make it with device='meta', or give init='rows'"
            )
        found[names[name]] = rules
    return found


def _make_reader(
    tables: Tables, spec: TableSpec, modules: Mapping[str, AnyEmbedding]
) -> TableReader:
    module = modules[spec.name]
    if isinstance(module, nn.EmbeddingBag):
        return BagReader(tables, spec, module)
    return TableReader(tables, spec)


def _choose_optimizers(
    given: RowOptimizer | Mapping[str, RowOptimizer] | None, names: list[str]
) -> Mapping[str, RowOptimizer]:
    usual: RowOptimizer = ROW_OPTIMIZERS[TrainConfig.row_optimizer]()
    optimizers = _by_table("row_optimizer", usual if given is None else given, names)
    for optimizer in optimizers.values():
        if not hasattr(optimizer, "state_shapes") or isinstance(optimizer, type):
            kind = optimizer if isinstance(optimizer, type) else type(optimizer)
            raise TypeError(
                f"row_optimizer is {kind.__module__}.{kind.__name__}, which cannot update rows of "
                "a table: give freescale.SGD, Adagrad, RowWiseAdagrad or Adam, with lr; torch "
                "optimizers are for sharded.dense_parameters()"
            )
    return optimizers


def _by_table(what: str, value: Any, names: list[str]) -> dict[str, Any]:
    """One value for all tables, or one for each."""
    values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(names, value)
    if set(values) != set(names):
        raise ValueError(f"{what} names {sorted(values)}, the tables are {sorted(names)}")
    return values


def _find_modules(model: nn.Module, ids: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Full module name -> the name that the user gave."""
    found: dict[str, str] = {}
    embeddings = {
        n: m for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    }
    if not isinstance(ids, Mapping):
        raise ValueError(
            f"ids is {ids!r}: map each embedding to the batch features that it reads, "
            "{'item': ['history']}"
        )
    for given, features in ids.items():
        if isinstance(features, str) or not features:
            raise ValueError(f"ids[{given!r}] must be a list of batch features, got {features!r}")
        matches = [n for n in embeddings if n == given] or [
            n for n in embeddings if n.endswith(f".{given}")
        ]
        if len(matches) != 1:
            known = sorted(embeddings) or "none"
            what = f"matches {matches}" if matches else f"matches none; the embeddings are {known}"
            raise ValueError(f"ids names a module {given!r}, which {what}")
        if matches[0] in found:
            raise ValueError(
                f"ids names module {matches[0]!r} twice, as {found[matches[0]]!r} and {given!r}"
            )
        found[matches[0]] = given
    if not found:
        raise ValueError(
            "ids is empty: name the model's embeddings and the batch features that they read"
        )
    return found


def _refuse_unsupported(model: nn.Module, modules: Mapping[str, AnyEmbedding], init: str) -> None:
    """Raises for what a sharded table cannot do, and names the module."""
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}.weight")
    for name, module in modules.items():
        refused = None
        kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
        if type(module) is not kind:
            refused = (
                f"{type(module).__name__} is a subclass of nn.{kind.__name__} whose forward may "
                f"differ: use nn.{kind.__name__} itself"
            )
        elif "forward" in vars(module):
            refused = (
                "its forward was replaced, which would be lost: compute on the rows it returns"
            )
        elif "weight" not in module._parameters:
            refused = (
                "its weight is computed from other parameters (weight_norm, pruning), which "
                "a table does not do: make it a plain parameter"
            )
        elif isinstance(module, nn.EmbeddingBag) and module.mode not in POOLINGS:
            refused = (
                f"mode {module.mode!r} is not supported, {' and '.join(POOLINGS)} are: use "
                "nn.Embedding and pool in the model"
            )
        elif module.max_norm is not None:
            refused = "max_norm is not supported: it changes rows while they are read"
        elif module.scale_grad_by_freq:
            refused = "scale_grad_by_freq is not supported: counts would have to cross ranks"
        elif sorted(uses[id(module.weight)]) != sorted(paths[id(module)]):
            refused = (
                f"its weight is tied ({', '.join(uses[id(module.weight)])}), which a "
                "sharded table does not support"
            )
        elif not module.weight.requires_grad:
            refused = "its weight is frozen; leave it out of `ids` to keep it as it is"
        elif module.weight.dtype not in (torch.float32, torch.float64):
            refused = (
                f"tables are float32 or float64, not {module.weight.dtype} (use autocast "
                "for bf16 compute)"
            )
        elif has_hooks(module):
            refused = "it has hooks, which would be lost: put them on its parent"
        elif module.weight._backward_hooks or module.weight._post_accumulate_grad_hooks:
            refused = (
                f"its parameter '{name}.weight' has hooks, which would be lost, since no rank has "
                "its gradient: change the rows that the module returns instead (detach the rows "
                "that are not to be trained), or clip with row_clip="
            )
        elif init == "weights" and module.weight.is_meta:
            refused = "init='weights' needs values, and its weight is on the meta device"
        if refused:
            raise ValueError(f"cannot shard embedding {name!r}: {refused}")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module, or its backward, calls hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
