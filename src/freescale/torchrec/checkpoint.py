"""Reads and writes TorchRec's checkpoints, to continue a TorchRec job here and vice versa."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freescale.embedding.layout import ShardLayout, find_ids, spread_ids
from freescale.embedding.tables import Tables
from freescale.torchrec import checkpoint_optimizer as dense_optimizer
from freescale.torchrec.checkpoint_names import (
    STEP,
    find_states,
    find_weights,
    match_table_states,
    name_table_states,
)
from freescale.torchrec.checkpoint_source import Source, Take, open_source
from freescale.torchrec.sharded_model import ShardedModel
from freescale.train.state.contents import mark_all_changed
from freescale.train.state.model import collect_dense, list_state, shard_over_ranks
from freescale.train.torch_files.tensor_writer import TensorWriter
from freescale.transport.api import Transport
from freescale.transport.failures import describe_error, run_on_all_ranks, run_on_rank_0
from freescale.transport.process_group import ProcessGroupTransport


def put_rows(local: Tensor, layout: ShardLayout, rank: int) -> Take:
    """Returns a function that receives a table [rows, ...] in the order of ids, piece by piece, and
    keeps a rank's part: local [n, ...], in spread order. Pieces may divide the columns, too."""
    rows = layout.specs[0].rows
    first, last = layout.get_owned_range(0, rank)

    def put(piece: Tensor, offsets: Sequence[int]) -> None:
        ids = torch.arange(offsets[0], offsets[0] + piece.shape[0])
        position = spread_ids(ids, rows)
        mine = (position >= first) & (position < last)
        values = piece[mine].to(local.device, local.dtype)
        places = (position[mine] - first).to(local.device)
        if local.dim() == 1:  # one value for each row, which may be [rows, 1]
            local[places] = values.view(-1)
        else:
            local[places, offsets[1] : offsets[1] + piece.shape[1]] = values

    return put


def collect_block(local: Tensor, layout: ShardLayout, rank: int, transport: Transport) -> Tensor:
    """A rank's part of a table in spread order [n, ...] -> the same part of the table in the order
    of ids. A collective if the layout has more ranks than one."""
    rows, block = layout.specs[0].rows, layout.block(0)
    first, last = layout.get_owned_range(0, rank)
    position = spread_ids(torch.arange(first, last, device=local.device), rows)
    if layout.world == 1:
        return local.index_select(0, position)
    receivers = find_ids(torch.arange(first, last, device=local.device), rows) // block
    send = torch.bincount(receivers, minlength=layout.world).tolist()
    receive = torch.bincount(position // block, minlength=layout.world).tolist()
    sent = local.index_select(0, receivers.argsort(stable=True))
    received = transport.all_to_all(sent, send, receive, "rows").wait()
    # Ordered by owner and within each owner: in all by position.
    collected = torch.empty_like(received)
    collected[position.argsort()] = received
    return collected


@dataclass(frozen=True)
class _Reading:
    """The checked content of a checkpoint."""

    source: Source
    dense: dict[str, Tensor]  # by key, to be filled
    tables: dict[str, dict[str, str]]  # by table: the key of its rows and of each state
    room: dense_optimizer.States  # of the optimizer, to be filled


def load_checkpoint(
    source: str | Path | Mapping[str, Any],
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    prefix: str | None = None,
) -> None:
    """Loads a checkpoint of a TorchRec job: by torch.distributed.checkpoint, from any number of
    ranks and any sharding, or by torch.save from an unsharded model. A collective; every rank reads
    the tables, one shard at a time.

    Args:
        source: the folder, the file, or a state_dict: of the model alone, or
            `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}` under any names.
        model: the result of `freescale.torchrec.parallelize`.
        optimizer: of its dense parameters. With it the states of the dense and of the row
            optimizers are loaded, too; None loads only weights. Adam of rows counts the steps of
            the pipeline: `pipeline.load_state_dict({"steps": steps})`.
        prefix: prefix of the model's names in the checkpoint, for example "model.". None finds it.

    Raises:
        ValueError: the checkpoint cannot be read, or does not fit the model. Nothing has changed
            then, unless a file is damaged.
    """
    tables, transport = model.tables, model.transport
    reading = run_on_all_ranks(transport, lambda: _prepare(source, model, optimizer, prefix))
    if not tables.placed:
        tables.place()
    tables.lease.discard()
    wanted: dict[str, Take] = {key: _fill(value) for key, value in reading.dense.items()}
    for name, keys in reading.tables.items():
        parts, (layout, rank) = tables.get_local_state(name), _find_layout(tables, name)
        wanted |= {key: put_rows(parts[part], layout, rank) for part, key in keys.items()}
    mark_all_changed(tables)
    run_on_all_ranks(transport, lambda: _read(reading.source, wanted))
    tables.reload()
    if optimizer is not None:
        dense_optimizer.restore(optimizer, _name_parameters(model), reading.room)


def _prepare(
    source: str | Path | Mapping[str, Any],
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    prefix: str | None,
) -> _Reading:
    found = open_source(source)
    try:
        return _find(found, model, optimizer, prefix)
    except ValueError as error:
        raise ValueError(f"{found.about} does not fit: {error}") from error


def _find(
    source: Source, model: ShardedModel, optimizer: torch.optim.Optimizer | None, prefix: str | None
) -> _Reading:
    own, specs, optimizers = _collect_dense(model), model.tables.specs, model.tables.optimizers
    names = [*(f"{name}.weight" for name in specs), *own]
    weights = find_weights(source.shapes, names, prefix)
    dense = {weights[name]: value for name, value in own.items()}
    tables = {name: {"rows": weights[f"{name}.weight"]} for name in specs}
    room: dense_optimizer.States = {}
    if optimizer is not None:
        states = find_states(source.shapes, names)
        for name, keys in tables.items():
            kept = states.get(f"{name}.weight", {})
            keys |= match_table_states(_get_table(name), optimizers[name], kept)
        room = dense_optimizer.make_room(optimizer, _name_parameters(model))
        dense |= dense_optimizer.match_states(room, states, type(optimizer).__name__)
    for key, value in dense.items():
        _check_shape(key, source.shapes[key], [list(value.shape)])
    for name, keys in tables.items():
        shapes = optimizers[name].state_shapes(specs[name].width) | {"rows": (specs[name].width,)}
        for part, key in keys.items():
            shape = [specs[name].rows, *shapes[part]]
            # torchrec's optimizer that is no kernel has a column of row-wise sums
            _check_shape(key, source.shapes[key], [shape, [*shape, 1]][: 1 + (len(shape) == 1)])
    return _Reading(source, dense, tables, room)


def _check_shape(key: str, there: Sequence[int], fitting: Sequence[Sequence[int]]) -> None:
    if list(there) not in [list(shape) for shape in fitting]:
        raise ValueError(
            f"{key!r} has shape {list(there)} there and {list(fitting[0])} here: the model or its "
            "optimizer is another one"
        )


def _read(source: Source, wanted: Mapping[str, Take]) -> None:
    try:
        source.read(wanted)
    except Exception as error:  # torch's reader has many, on this rank
        raise ValueError(
            f"{source.about} could not be read, and the model has a part of it: "
            f"{describe_error(error)}"
        ) from error


def _fill(own: Tensor) -> Take:
    def take(piece: Tensor, offsets: Sequence[int]) -> None:
        part = own
        for axis, (offset, length) in enumerate(zip(offsets, piece.shape, strict=True)):
            part = part.narrow(axis, offset, length)
        part.copy_(piece)

    return take


def save_checkpoint(
    folder: str | Path, model: ShardedModel, optimizer: torch.optim.Optimizer | None = None
) -> Path:
    """Writes a checkpoint for TorchRec, by torch.distributed.checkpoint:
    `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}` of a sharded model is
    loaded from it, on any number of ranks. A collective; needs the memory of the tables once more.

    Args:
        folder: the folder to write. It must not exist.
        model: the result of `freescale.torchrec.parallelize`.
        optimizer: of its dense parameters. With it the states of the dense and of the row
            optimizers are written, too.

    Raises:
        ValueError: it cannot be written, or something has no counterpart in TorchRec. Nothing is
            left behind.
    """
    path, transport, tables = Path(folder), model.transport, model.tables
    failure = f"checkpoint {path} could not be written"
    run_on_rank_0(transport, lambda: _refuse_existing(path), failure)
    if not tables.placed:
        tables.place()

    def name_states() -> tuple[dict[str, dict[str, tuple[str, ...]]], dense_optimizer.States]:
        if optimizer is None:
            return {}, {}
        of_tables = {
            name: name_table_states(
                _get_table(name),
                tables.optimizers[name],
                replicated=tables.placements[name].kind == "replicated",
            )
            for name in tables.specs
        }
        return of_tables, dense_optimizer.list_states(optimizer, _name_parameters(model))

    of_tables, states = run_on_all_ranks(transport, name_states)
    step = next((kept[STEP] for kept in states.values() if STEP in kept), None)
    tables.lease.flush()
    weights = _collect_dense(model)
    for name in tables.specs:
        parts = _collect_table(tables, name)
        weights[f"{name}.weight"] = parts["rows"]
        kept = {
            known: parts[part] for part, every in of_tables.get(name, {}).items() for known in every
        }
        if step is not None and tables.placements[name].kind == "replicated":
            kept[STEP] = step  # as the dense optimizer counts, which trains data-parallel tables
        states[f"{name}.weight"] = kept
    content: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        content["optimizer"] = {"state": states}
    writing = path.with_name(f"{path.name}.writing")
    try:
        run_on_rank_0(transport, lambda: writing.mkdir(parents=True, exist_ok=True), failure)
        TensorWriter().write(writing, content, transport, failure)
        run_on_rank_0(transport, lambda: writing.rename(path), failure)
    except ValueError:  # on all ranks
        if transport.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise
    return path


def _collect_table(tables: Tables, name: str) -> dict[str, Tensor]:
    """A table's rows and states in the order of ids, each whole over all ranks. A collective."""
    layout, rank = _find_layout(tables, name)
    parts = {}
    for part, local in tables.get_local_state(name).items():
        parts[part] = collect_block(local, layout, rank, tables.transport)
        if layout.world > 1:
            assert isinstance(tables.transport, ProcessGroupTransport)
            parts[part] = shard_over_ranks(parts[part], layout.specs[0].rows, tables.transport)
    return parts


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ValueError(f"{path} is there already: remove it, or give another folder")


def _find_layout(tables: Tables, name: str) -> tuple[ShardLayout, int]:
    """The layout of a single table, and the part of this rank."""
    sharded = tables.placements[name].kind == "sharded"
    world, rank = (tables.transport.world, tables.transport.rank) if sharded else (1, 0)
    return ShardLayout((tables.specs[name],), world), rank


def _get_table(name: str) -> str:
    """A table's name in its config, from its path."""
    return name.rpartition(".")[2]


def _collect_dense(model: ShardedModel) -> dict[str, Tensor]:
    """Dense tensors by their names in the user's model."""
    return {
        name.removeprefix("dense/"): value
        for name, value in collect_dense(list_state(model.module.model)).items()
    }


def _name_parameters(model: ShardedModel) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.module.model.named_parameters()}
