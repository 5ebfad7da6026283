"""`parallelize`: finds a model's nn.Embedding modules, swaps them for readers of sharded tables,
leaves its code alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freescale.config import TrainConfig
from freescale.embedding.layout import TableSpec
from freescale.embedding.optimizers import ROW_OPTIMIZERS, RowOptimizer
from freescale.embedding.replicas import refuse, take_from_rank_zero
from freescale.embedding.tables import Tables
from freescale.transport.api import Transport
from freescale.transport.local import LocalTransport


class TableReader(nn.Module):
    """Stands where an nn.Embedding stood. Has no parameters: the rows live in the tables."""

    def __init__(self, tables: Tables, spec: TableSpec) -> None:
        super().__init__()
        self._tables = tables
        self.table = spec.name
        self.num_embeddings = spec.rows
        self.embedding_dim = spec.width
        self.padding_idx = spec.padding

    def forward(self, ids: Tensor) -> Tensor:
        return self._tables.read(self.table, ids)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise RuntimeError(
                f"module {self.table!r} is a sharded table and has no whole weight: call the "
                "module with ids instead"
            )
        return super().__getattr__(name)


class ShardedModel:
    """A model whose tables are sharded. Call it like the model; train it with a Pipeline."""

    def __init__(self, module: nn.Module, tables: Tables) -> None:
        self.module = module
        self.tables = tables

    @property
    def transport(self) -> Transport:
        return self.tables.transport

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """Everything that is not a table: replicated on every rank."""
        return self.module.parameters()

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)


def parallelize(
    model: nn.Module,
    ids: Mapping[str, Sequence[str]],
    row_optimizer: RowOptimizer | Mapping[str, RowOptimizer] | None = None,
    *,
    transport: Transport | None = None,
    placement: str | Mapping[str, str] = TrainConfig.placement,
    init: str = "rows",
    init_std: float | Mapping[str, float] = 1.0,
    seed: int = TrainConfig.seed,
    row_clip: float | None = TrainConfig.row_clip,
    wire_dtype: torch.dtype | None = None,
) -> ShardedModel:
    """Swaps the nn.Embedding modules named in `ids` for tables over all ranks of `transport`;
    changes `model` in place.

    `ids` maps a module's name (or an unambiguous end of it) to the batch features it reads.
    Embeddings that are not named stay as they are, as dense parameters. With init="rows" rows are
    drawn from a normal distribution (`init_std`) as a function of (seed, table, row), so that the
    number of ranks does not matter; modules may then be on the meta device and need no memory.
    init="weights" keeps the modules' values. `placement` is auto, sharded or replicated, for all
    tables or per table. Dense parameters and buffers are rank 0's, bit for bit. `wire_dtype`
    (torch.bfloat16) rounds rows and gradients on the wire.
    """
    transport = transport or LocalTransport()
    given = _given_names(model, ids)
    modules: dict[str, nn.Embedding] = {name: model.get_submodule(name) for name in given}  # type: ignore[misc]
    _refuse(model, modules, init)
    refuse(model, [module.weight for module in modules.values()], transport)
    features = {name: tuple(ids[short]) for name, short in given.items()}
    specs = [
        TableSpec(
            name, m.num_embeddings, m.embedding_dim, m.weight.dtype, features[name], m.padding_idx
        )
        for name, m in modules.items()
    ]
    names = [spec.name for spec in specs]
    usual = ROW_OPTIMIZERS[TrainConfig.row_optimizer]()
    optimizer: RowOptimizer | Mapping[str, RowOptimizer] = (
        usual if row_optimizer is None else row_optimizer
    )
    optimizers = optimizer if isinstance(optimizer, Mapping) else dict.fromkeys(names, optimizer)
    stds = init_std if isinstance(init_std, Mapping) else dict.fromkeys(names, init_std)
    for what, mapping in (("row_optimizer", optimizers), ("init_std", stds)):
        if set(mapping) != set(names):
            raise ValueError(f"{what} names {sorted(mapping)}, the tables are {sorted(names)}")
    weights = (
        {name: m.weight.detach() for name, m in modules.items()} if init == "weights" else None
    )
    tables = Tables(
        specs,
        optimizers,
        transport,
        placement=placement,
        seed=seed,
        std=stds,
        weights=weights,
        row_clip=row_clip,
        wire=wire_dtype,
    )
    readers = {id(modules[spec.name]): TableReader(tables, spec) for spec in specs}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in readers:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, readers[id(module)])
    model.to(transport.device)
    take_from_rank_zero(model, transport)
    return ShardedModel(model, tables)


def _given_names(model: nn.Module, ids: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Full module name -> the name that the user gave."""
    found: dict[str, str] = {}
    embeddings = {
        n: m for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    }
    for given, features in ids.items():
        if isinstance(features, str) or not features:
            raise ValueError(f"ids[{given!r}] must be a list of batch features, got {features!r}")
        matches = [n for n in embeddings if n == given] or [
            n for n in embeddings if n.endswith(f".{given}")
        ]
        if len(matches) != 1:
            what = (
                f"matches {matches}"
                if matches
                else (f"matches none; the embeddings are {sorted(embeddings) or 'none'}")
            )
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


def _refuse(model: nn.Module, modules: Mapping[str, nn.Embedding], init: str) -> None:
    """What a sharded table cannot do, by name."""
    if init not in ("rows", "weights"):
        raise ValueError(f"init must be 'rows' or 'weights', not {init!r}")
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}.weight")
    for name, module in modules.items():
        refused = None
        if isinstance(module, nn.EmbeddingBag):
            refused = "EmbeddingBag is not supported: use nn.Embedding and pool in the model"
        elif type(module) is not nn.Embedding:
            refused = (
                f"{type(module).__name__} is a subclass of nn.Embedding whose forward may "
                "differ: use nn.Embedding itself"
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
        elif module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            refused = "it has hooks, which would be lost: put them on its parent"
        elif init == "weights" and module.weight.is_meta:
            refused = "init='weights' needs values, and its weight is on the meta device"
        if refused:
            raise ValueError(f"cannot shard embedding {name!r}: {refused}")
