"""Restores a model, and what trains it, from a rank's own snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import Reducer
from freescale.train.state.compression_state import CompressionState
from freescale.train.state.files import Damaged
from freescale.train.state.memory_chain import apply_changes
from freescale.train.state.model import (
    collect_dense,
    collect_random,
    list_state,
    name_parameters,
    refuse_other_model,
    restore_extra,
    restore_random,
)
from freescale.train.state.optimizer import unpack_optimizer
from freescale.train.state.packing import Unpacker


def refuse_other(
    label: str, state: Mapping[str, Any], model: ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Damaged if the state is another model's, or from another kind of device."""
    try:
        refuse_other_model(Path(label), state, model, optimizer)
    except ValueError as error:
        raise Damaged(str(error)) from None
    if state["device"] != model.transport.device.type:
        raise Damaged(f"{label} is from ranks on {state['device']}")


def load_state(
    state: Mapping[str, Any],
    chain: Sequence[Mapping[str, Tensor]],
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    reducer: Reducer | None,
    copy_whole: Callable[[str, Tensor], None] | None = None,
) -> dict[str, Any]:
    """Restores a rank from the state of the last memory file and the tensors of each. The model is
    placed as it was; the optimizer's settings stay as they are; what was deferred is forgotten. A
    collective; returns the progress that was saved. `copy_whole`: (name, where to) -> copies a
    large tensor of the first file; torch does it if None."""
    transport, tables, names = model.transport, model.tables, name_parameters(model)
    rest = {
        name.removeprefix("rest/"): value
        for name, value in chain[-1].items()
        if name.startswith("rest/")
    }
    unpacker = Unpacker(state, _describe_tensors(rest), transport.device)
    extra = {name: unpacker.unpack(packed) for name, packed in state["extra_state"].items()}
    kept = unpack_optimizer(optimizer, names, state, unpacker)
    random = collect_random(transport)
    carried = CompressionState(reducer, names)
    rank, world = transport.rank, transport.world
    errors = carried.allocate(state.get("carried", ()), rank, world, world)
    tables.lease.discard()
    with torch.no_grad():
        for name, room in (
            collect_dense(list_state(model.module)) | unpacker.tensors | random | errors
        ).items():
            room.copy_(rest[name])
        parts = {name: tables.get_local_state(name) for name in tables.specs}
        for name, of in parts.items():
            for part, value in of.items():
                if copy_whole is not None:
                    copy_whole(f"table/{name}/{part}", value)
                else:
                    value.copy_(chain[0][f"table/{name}/{part}"])
            for part, value in tables.get_group(name).rows.get_shard_tensors().items():
                value.copy_(chain[-1][f"shards/{name}/{part}"])
        for tensors in chain[1:]:
            apply_changes(parts, tensors)
        tables.reload()
    restore_extra(model.module, extra)
    optimizer.state.clear()
    optimizer.state.update(kept)
    restore_random(random, transport)
    carried.restore(same_ranks=True)
    _restore_marks(state, chain[-1], model)
    progress: dict[str, Any] = state["progress"]
    return progress


def _describe_tensors(tensors: Mapping[str, Tensor]) -> Metadata:
    """As torch describes those of a checkpoint."""
    return Metadata(
        {
            name: TensorStorageMetadata(TensorProperties(value.dtype), value.shape, [])
            for name, value in tensors.items()
        }
    )


def _restore_marks(
    state: Mapping[str, Any], tensors: Mapping[str, Tensor], model: ShardedModel
) -> None:
    """What had changed for each consumer, so that its next delta holds everything since its
    last."""
    groups = model.tables.groups
    for group in groups:
        group.rows.changed.mark_all()
    for number, consumer, label in state["marks"]:
        changed = groups[number].rows.changed
        size = groups[number].rows.size
        marks = np.unpackbits(tensors[label].numpy(), count=size)
        changed.set_marks(consumer, torch.from_numpy(marks).bool())
