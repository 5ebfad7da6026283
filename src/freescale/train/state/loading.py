"""Restores a model, and what trains it, from a checkpoint that is intact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from freescale.embedding.dynamic_rules import SHARDS
from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import Reducer
from freescale.train.state.chain import Intact
from freescale.train.state.compression_state import CompressionState
from freescale.train.state.delta import apply_deltas, list_parts, mark_all_changed
from freescale.train.state.errors import explain_errors
from freescale.train.state.model import (
    collect_dense,
    collect_random,
    collect_shards,
    collect_tables,
    list_state,
    name_parameters,
    refuse_other_model,
    restore_extra,
    restore_random,
)
from freescale.train.state.optimizer import unpack_optimizer
from freescale.train.state.packing import Unpacker
from freescale.train.state.safe_reader import SafeReader
from freescale.train.state.writing import coordinate
from freescale.transport.api import Transport
from freescale.transport.failures import run_on_all_ranks


def load_checkpoint(
    checkpoint: Intact,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    reducer: Reducer | None,
) -> dict[str, Any]:
    """As `Checkpoints.load`. A collective; returns the progress that was saved."""
    path, state = checkpoint.path, checkpoint.state
    transport, names = model.transport, name_parameters(model)
    if not model.tables.placed:
        model.tables.place(recorded=state["placement"])
    refuse_other_model(path, state, model, optimizer)
    reader = SafeReader(path)
    metadata = run_on_all_ranks(transport, reader.read_metadata)
    unpacker = Unpacker(state, metadata, transport.device)
    extra = {name: unpacker.unpack(packed) for name, packed in state.get("extra_state", {}).items()}
    kept = unpack_optimizer(optimizer, names, state, unpacker) if optimizer is not None else {}
    # Other ranks or devices have other random states; each rank keeps its own.
    same_ranks = state["ranks"] == transport.world and state["device"] == transport.device.type
    random = collect_random(transport) if optimizer is not None and same_ranks else {}
    carried = CompressionState(reducer, names)
    errors = carried.allocate(
        state.get("carried", ()), transport.rank, transport.world, state["ranks"]
    )
    own = collect_dense(list_state(model.module)) | unpacker.tensors | random | errors
    model.tables.lease.discard()
    tables = collect_tables(model.tables, model.tables.specs)
    own |= collect_shards(model.tables, model.tables.specs)
    mark_all_changed(model.tables)
    if checkpoint.ancestors:
        base = checkpoint.base.path
        _load_tensors(base, tables, SafeReader(base), transport)
        run_on_all_ranks(
            transport, lambda: apply_deltas(checkpoint.deltas, list_parts(model.tables))
        )
    else:
        own |= tables
    _load_tensors(path, own, reader, transport)
    model.tables.reload()
    restore_extra(model.module, extra)
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(kept)
    if random:
        restore_random(random, transport)
    carried.restore(same_ranks=state["ranks"] == transport.world)
    progress: dict[str, Any] = state["progress"]
    return progress


def _load_tensors(
    path: Path, tensors: dict[str, Tensor], reader: SafeReader, transport: Transport
) -> None:
    metadata = run_on_all_ranks(transport, reader.read_metadata)
    finer = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, value in tensors.items()
        if isinstance(entry := metadata.state_dict_metadata.get(name), TensorStorageMetadata)
        and name.startswith(("table/", "shards/"))
        and entry.size[0] == SHARDS > value.shape[0]
    }
    with explain_errors(f"checkpoint {path} could not be read"):
        load(tensors | finer, storage_reader=reader, **coordinate(transport))
    for name, whole in finer.items():
        _join_shards(tensors[name], whole, transport)


def _join_shards(value: Tensor, whole: Tensor, transport: Transport) -> None:
    """Copies this rank's part of a small dynamic table that was saved, in an earlier version, in as
    many shards as a large one has. Its own are some of those in a row: rows keep their positions.
    The number of batches, the same in all shards, is all that has fewer elements than before."""
    joined = whole.view(-1)[: value.numel()].view(value.shape)
    block = -(-value.shape[0] // transport.world)  # as DynamicLayout and torch divide shards
    own = joined[transport.rank * block : (transport.rank + 1) * block]
    (value.to_local() if isinstance(value, DTensor) else value).copy_(own)
