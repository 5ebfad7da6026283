"""The model in a state: its dense part and tables as named tensors that share memory with it, what
its modules keep in addition, and the description by which another model is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.train.state.packing import pack
from freescale.transport.api import Transport
from freescale.transport.process_group import ProcessGroupTransport

_EXTRA = "_extra_state"  # torch's name for what a module's get_extra_state returns
_FIXED_TABLE = 4  # entries that describe a table; those of dynamic ones are more
_meshes: WeakKeyDictionary[ProcessGroupTransport, dict[str, DeviceMesh]] = WeakKeyDictionary()


def name_parameters(model: ShardedModel) -> dict[int, str]:
    """Names of the dense parameters, by identity."""
    return {id(parameter): name for name, parameter in model.module.named_parameters()}


def list_state(module: nn.Module) -> dict[str, Any]:
    """The module's state_dict, with parameters as parameters."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return state


def collect_dense(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Named tensors of the result of `list_state`."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if _is_extra(name):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} in the model's state_dict is a {type(value).__name__}, not "
                "a tensor: use get_extra_state"
            )
        tensors[f"dense/{name}"] = value.detach()
    return tensors


def find_untrained(state: Mapping[str, Any]) -> set[str]:
    """Names of those dense tensors that are buffers or frozen parameters."""
    return {
        f"dense/{name}"
        for name, value in state.items()
        if not (isinstance(value, nn.Parameter) and value.requires_grad)
    }


# ---- tables


def share(value: Tensor) -> Tensor:
    """In place of a copy."""
    return value


def collect_tables(
    tables: Tables, names: Iterable[str], copy: Callable[[Tensor], Tensor] = share
) -> dict[str, Tensor]:
    """Tensors of named tables, whole over all ranks; `copy` is applied to this rank's parts."""
    return {
        f"table/{name}/{part}": _make_whole(copy(value), name, tables)
        for name in names
        for part, value in tables.get_local_state(name).items()
    }


def collect_shards(
    tables: Tables, names: Iterable[str], copy: Callable[[Tensor], Tensor] = share
) -> dict[str, Tensor]:
    """What virtual shards of dynamic tables hold in addition to their rows; whole, like tables."""
    return {
        f"shards/{name}/{part}": shard_over_ranks(copy(value), rules.shards, tables.transport)
        for name in names
        if (rules := tables.specs[name].dynamic) is not None
        for part, value in tables.get_group(name).rows.get_shard_tensors().items()
    }


def _make_whole(local: Tensor, name: str, tables: Tables) -> Tensor:
    """A rank's part of a table as torch's sharded tensor; a replicated table is a plain tensor. A
    dynamic one is [virtual shards, rows of each, ...]: ranks own whole shards."""
    if tables.placements[name].kind == "replicated":
        return local
    spec, transport = tables.specs[name], tables.transport
    rules = spec.dynamic
    if rules is None:
        return shard_over_ranks(local, spec.rows, transport)
    return shard_over_ranks(
        local.view(-1, rules.shard_rows, *local.shape[1:]), rules.shards, transport
    )


def shard_over_ranks(local: Tensor, rows: int, transport: Transport) -> Tensor:
    """Equal blocks of rows, one on each rank, as torch's sharded tensor [rows, ...]."""
    if not isinstance(transport, ProcessGroupTransport):
        return local
    mesh = _get_mesh(transport, local.device.type)
    shape = torch.Size((rows, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _get_mesh(transport: ProcessGroupTransport, device: str) -> DeviceMesh:
    """The ranks as torch describes them. Made once: it takes milliseconds."""
    known = _meshes.setdefault(transport, {})
    if device not in known:
        group = transport.group if device == "cuda" else transport.control
        known[device] = DeviceMesh.from_group(group, device)
    return known[device]


# ---- extra state of modules


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def pack_extra(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Packs it by module name."""
    return {
        name.rpartition(".")[0]: pack(value, f"extra/{name}", tensors)
        for name, value in state.items()
        if _is_extra(name)
    }


def restore_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        module.get_submodule(name).set_extra_state(value)


# ---- random state


def collect_random(transport: Transport) -> dict[str, Tensor]:
    tensors = {f"random/{transport.rank}/cpu": torch.get_rng_state()}
    if transport.device.type == "cuda":
        tensors[f"random/{transport.rank}/cuda"] = torch.cuda.get_rng_state(transport.device)
    return tensors


def restore_random(tensors: Mapping[str, Tensor], transport: Transport) -> None:
    torch.set_rng_state(tensors[f"random/{transport.rank}/cpu"])
    if transport.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"random/{transport.rank}/cuda"], transport.device)


# ---- which model it is


def describe_model(
    model: ShardedModel, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Describes the model, to refuse another one. `state`: the result of `list_state`."""
    tables = model.tables
    return {
        "dense": {
            name: [list(value.shape), str(value.dtype)]
            for name, value in state.items()
            if isinstance(value, Tensor) and not _is_extra(name)
        },
        "tables": {
            name: [
                *(spec.rows, spec.width, str(spec.dtype), tables.optimizers[name].name),
                *(spec.dynamic.describe() if spec.dynamic is not None else ()),
            ]
            for name, spec in tables.specs.items()
        },
        "placement": {name: placement.kind for name, placement in tables.placements.items()},
        "exchange": tables.exchange[0],
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
    }


def place_as_saved(model: ShardedModel, state: Mapping[str, Any], continues: bool = True) -> None:
    """Places the tables as the description of a saved model says, unless they are placed. A
    collective."""
    exchange = state.get("exchange", "flat")  # earlier versions had no other
    model.tables.place_as_saved(state["placement"], exchange, continues)


def refuse_other_model(
    path: Path | str,
    saved: Mapping[str, Any],
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    may_grow: bool = False,
) -> None:
    """ValueError for the first difference of `saved` and this model; its tables `may_grow`."""
    state = list_state(model.module)
    here = describe_model(model, state, optimizer)
    other = f"{path} is a checkpoint of another model"
    for part, what in (("tables", "table"), ("dense", "parameter")):
        for name in sorted(name for name in {*saved[part], *here[part]} if not _is_extra(name)):
            there, now = saved[part].get(name), here[part].get(name)
            if may_grow and there and now and part == "tables" and len(now) == _FIXED_TABLE:
                now = [min(there[0], now[0]), *now[1:]]
            if there != now:
                found = f"{there or 'absent'} there, {now or 'absent'} here"
                raise ValueError(f"{other}: {what} {name!r} is {found}")
    if "extra_state" in saved:
        there, now = set(saved["extra_state"]), set(pack_extra(state, {}))
        for name in sorted(there ^ now):
            only = "there" if name in there else "here"
            raise ValueError(f"{other}: module {name!r} has extra state only {only}")
    if here["optimizer"] is not None and saved["optimizer"] != here["optimizer"]:
        raise ValueError(
            f"{path} was trained with {saved['optimizer']}, not {here['optimizer']}: "
            "use the same dense optimizer"
        )
