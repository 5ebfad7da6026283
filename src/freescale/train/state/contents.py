"""What a checkpoint holds: everything as named tensors, and the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import Reducer
from freescale.train.state.compression_state import CompressionState
from freescale.train.state.delta import Span, collect_changes, follow_changes
from freescale.train.state.files import DELTA_FORMAT, FORMAT
from freescale.train.state.model import (
    collect_dense,
    collect_random,
    collect_shards,
    collect_tables,
    describe_model,
    find_untrained,
    list_state,
    name_parameters,
    pack_extra,
    share,
)
from freescale.train.state.optimizer import pack_optimizer, refuse_before_it_steps
from freescale.train.state.state_copies import StateCopies


@dataclass
class Contents:
    """Of a checkpoint, on this rank. What the main thread updates is collected between two steps,
    rows of sharded tables once no gradients are deferred."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    untrained: set[str]  # tensors that may be infinite
    spans: dict[str, Span] | None  # of a delta: which rows of each table this rank writes
    copies: StateCopies | None = None  # the tensors have their values once it is finished
    _source: _Source | None = field(default=None, repr=False)  # until all is collected

    @staticmethod
    def collect(
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        reducer: Reducer | None,
        *,
        consumer: str | None,
        delta: bool,
        copy: bool,
    ) -> Contents:
        """Everything that a run needs to go on, but for the rows of sharded tables. Between two
        steps. ValueError names what a checkpoint cannot hold.

        Args:
            consumer: changes of rows are marked for it from now on.
            delta: of the tables only the rows that are marked so far; otherwise whole tables.
            copy: the tensors are copies in host memory, and training may go on; otherwise they
                share memory with the model's.
        """
        transport = model.transport
        listed = list_state(model.module)
        tensors, state = collect_rest(model, listed, optimizer, progress, reducer)
        state["format"] = DELTA_FORMAT if delta else FORMAT
        copies = StateCopies(transport.device) if copy else None
        if copies is not None:
            tensors = copies.take_all(tensors)
        tensors |= collect_random(transport)  # copies
        source = _Source(model, consumer, delta, model.tables.lease.mark_state())
        spans: dict[str, Span] | None = {} if delta else None
        contents = Contents(tensors, state, find_untrained(listed), spans, copies, source)
        contents._add("replicated")
        return contents

    def add_sharded(self) -> None:
        """The rows of sharded tables, as they are now. On the caller's thread and stream."""
        assert self._source is not None
        with self._source.model.tables.lease.looking_back(self._source.mark):
            self._add("sharded")
        self._source = None

    def _add(self, kind: str) -> None:
        """Tables of a placement; from now on their changes count for the next checkpoint."""
        assert self._source is not None
        model, consumer = self._source.model, self._source.consumer
        tables = model.tables
        names = [name for name in tables.specs if tables.placements[name].kind == kind]
        take = self.copies.take if self.copies is not None else share
        if self._source.delta:
            assert consumer is not None and self.spans is not None
            tensors, spans = collect_changes(tables, consumer, names)
            self.spans |= spans
            if self.copies is not None:
                tensors = {
                    name: self.copies.take(value, is_copy=True) for name, value in tensors.items()
                }
        else:
            tensors = collect_tables(tables, names, take)
        self.tensors |= tensors | collect_shards(tables, names, take)
        if consumer is not None:
            follow_changes(tables, consumer, names)
        if self.copies is not None:
            self.copies.seal()


def refuse_unsavable(model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError that names what a checkpoint cannot hold, before training."""
    listed = list_state(model.module)
    collect_dense(listed)
    pack_extra(listed, {})
    refuse_before_it_steps(optimizer, name_parameters(model))


def collect_rest(
    model: ShardedModel,
    listed: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    reducer: Reducer | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All but rows and random state: (tensors that share memory with the model's, plain JSON).
    `listed`: what `list_state` found of the model's module.

    Raises:
        ValueError: names what a checkpoint cannot hold.
    """
    try:
        json.dumps(dict(progress))
    except TypeError as error:
        raise ValueError(f"progress must be plain JSON: {error}") from None
    transport, names = model.transport, name_parameters(model)
    tensors: dict[str, Tensor] = {}
    extra = pack_extra(listed, tensors)
    own, shared = pack_optimizer(optimizer, names, tensors)
    carried = CompressionState(reducer, names)
    state = describe_model(model, listed, optimizer) | {"progress": dict(progress)}
    state |= {"ranks": transport.world, "device": transport.device.type}
    state |= {"optimizer_state": own, "optimizer_shared": shared, "extra_state": extra}
    if transport.device.type != "cpu":
        state["on_host"] = [name for name, value in tensors.items() if value.device.type == "cpu"]
    state |= {"carried": carried.names} if carried.names else {}
    return collect_dense(listed) | tensors | carried.tensors(transport.rank), state


@dataclass(frozen=True)
class _Source:
    model: ShardedModel
    consumer: str | None
    delta: bool
    mark: list[int]  # the step, for tables whose rows come and go
