"""What a checkpoint holds: everything as named tensors, and the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import Reducer
from freescale.streams import record_event
from freescale.train.checkpoint.compression_state import CompressionState
from freescale.train.checkpoint.delta import Span, collect_changes
from freescale.train.checkpoint.files import DELTA_FORMAT, FORMAT
from freescale.train.checkpoint.model import (
    collect_dense,
    collect_random,
    collect_tables,
    describe_model,
    find_untrained,
    name_parameters,
    pack_extra,
)
from freescale.train.checkpoint.optimizer import pack_optimizer


@dataclass
class Contents:
    """Of a checkpoint, on this rank."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    untrained: set[str]  # tensors that may be infinite
    spans: dict[str, Span] | None  # of a delta: which rows of each table this rank writes
    copied: torch.cuda.Event | None = None  # from then on the tensors hold their values


def collect_contents(
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    reducer: Reducer | None,
    *,
    consumer: str | None,
    copy: bool,
) -> Contents:
    """Everything that a run needs to go on. Changes nothing.

    Args:
        model: between two steps, with no gradients deferred.
        optimizer: of its dense parameters.
        progress: plain JSON.
        reducer: of the pipeline.
        consumer: of the tables only the rows that are marked as changed for it; None: whole tables.
        copy: the tensors are copies in host memory, and training may go on; otherwise they share
            memory with the model's.

    Raises:
        ValueError: names what a checkpoint cannot hold.
    """
    try:
        json.dumps(dict(progress))
    except TypeError as error:
        raise ValueError(f"progress must be plain JSON: {error}") from None
    transport, names = model.transport, name_parameters(model)
    take = copy_to_host if copy else _share
    beside: dict[str, Tensor] = {}
    extra = pack_extra(model.module, beside)
    own, shared = pack_optimizer(optimizer, names, beside)
    carried = CompressionState(reducer, names)
    state: dict[str, Any] = {"format": FORMAT if consumer is None else DELTA_FORMAT}
    state |= describe_model(model, optimizer) | {"progress": dict(progress)}
    state |= {"ranks": transport.world, "device": transport.device.type}
    state |= {"optimizer_state": own, "optimizer_shared": shared, "extra_state": extra}
    if transport.device.type != "cpu":
        state["on_host"] = [name for name, value in beside.items() if value.device.type == "cpu"]
    state |= {"carried": carried.names} if carried.names else {}
    spans = None
    if consumer is None:
        tables = collect_tables(model.tables, transport, take)
    else:
        tables, spans = collect_changes(model.tables, consumer)
        if transport.device.type != "cpu":
            tables = {name: take(value) for name, value in tables.items()}
    others = collect_dense(model.module) | beside | carried.tensors(transport.rank)
    tensors = {name: take(value) for name, value in others.items()} | tables
    tensors |= collect_random(transport)  # copies
    event = record_event(blocking=True) if copy and transport.device.type == "cuda" else None
    return Contents(tensors, state, find_untrained(model.module), spans, event)


def _share(value: Tensor) -> Tensor:
    return value


def copy_to_host(value: Tensor) -> Tensor:
    """A copy in host memory. Of a GPU's tensor it is made on the current stream, into pinned
    memory, which torch keeps for the next copy; what the stream does later does not change it."""
    if value.device.type == "cpu":
        return value.clone()
    copied = torch.empty_like(value, device="cpu", pin_memory=True)
    return copied.copy_(value, non_blocking=True)
