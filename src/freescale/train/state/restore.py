"""Restores a run's state, from disk or from memory, into what trains it; all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.layout import ShardLayout, find_ids, spread_ids
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.train.state.contents import Span, mark_all_changed
from freescale.train.state.intact import Intact
from freescale.train.state.model import (
    collect_dense,
    collect_random,
    collect_shards,
    collect_tables,
    list_state,
    name_parameters,
    place_as_saved,
    refuse_other_model,
    restore_extra,
    restore_random,
    shard_over_ranks,
)
from freescale.train.state.packing import Unpacker, unpack_optimizer
from freescale.train.torch_files.safe_reader import SafeReader
from freescale.transport.api import gather_json
from freescale.transport.failures import run_on_all_ranks

_AT_ONCE = 1 << 18  # rows of a rank that are on their way together


class SmallerTable:
    """A table as it was saved, with fewer rows than it has now: new ids keep the rows they were
    drawn. Its spread order (embedding/layout.py) changes as it grows: each rank reads its block of
    the saved order and sends the rows to their new owners. `tensors` has positions [first, last),
    this rank's or all of a replicated one: `rows`, and each tensor of their optimizer."""

    def __init__(self, name: str, rows: int, tables: Tables) -> None:
        self.name, self._rows, self._tables = name, rows, tables
        transport, whole = tables.transport, tables.placements[name].kind == "replicated"
        self._world, self._rank = (1, 0) if whole else (transport.world, transport.rank)
        layout = ShardLayout((replace(tables.specs[name], rows=rows),), self._world)
        self.first, self.last = layout.get_owned_range(0, self._rank)
        self._block = layout.block(0)
        self.tensors = {
            part: value.new_empty((self.last - self.first, *value.shape[1:]))
            for part, value in tables.get_local_state(name).items()
        }

    def label_whole(self) -> dict[str, Tensor]:
        """The tensors as a checkpoint names them; each is whole, over all ranks."""
        found = {f"table/{self.name}/{part}": value for part, value in self.tensors.items()}
        if self._world == 1:
            return found
        transport = self._tables.transport
        return {
            name: shard_over_ranks(value, self._rows, transport) for name, value in found.items()
        }

    def move(self) -> None:
        """Copies the rows into the table. A collective if it is sharded."""
        spec, into = self._tables.specs[self.name], self._tables.get_local_state(self.name)
        block = -(-spec.rows // self._world)
        for begin in range(0, self._block, _AT_ONCE):  # the same number of exchanges on every rank
            part = slice(begin, max(begin, min(begin + _AT_ONCE, self.last - self.first)))
            old = torch.arange(self.first + part.start, self.first + part.stop)
            places, order = spread_ids(find_ids(old, self._rows), spec.rows).sort()
            counts = torch.bincount(places // block, minlength=self._world).tolist()
            own = self._exchange(places, counts, "ids") - self._rank * block
            for name, value in self.tensors.items():
                rows = self._exchange(value[part][order.to(value.device)], counts, "rows")
                into[name].index_copy_(0, own.to(value.device), rows.to(value.device))

    def _exchange(self, rows: Tensor, send: list[int], kind: str) -> Tensor:
        if self._world == 1:
            return rows
        transport = self._tables.transport
        receive = [sizes[self._rank] for sizes in gather_json(transport, send)]
        return transport.all_to_all(rows.to(transport.device), send, receive, kind).wait()


class Restore:
    """A restore in two steps: `tensors`, everything but the tables, is to be filled by the store;
    `finish` puts it into its place. Deferred gradients of the model, whose tables are placed, are
    forgotten. `saved`: tensors with the shapes and types of the saved ones; without an optimizer,
    weights and tables only; `continues`: the run goes on where it was, random state included."""

    def __init__(
        self,
        state: Mapping[str, Any],
        saved: Mapping[str, Tensor],
        model: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        continues: bool = True,
    ) -> None:
        self._state, self._model, self._optimizer = state, model, optimizer
        transport, names = model.transport, name_parameters(model)
        unpacker = Unpacker(state, saved, transport.device)
        self._extra = {
            name: unpacker.unpack(packed) for name, packed in state.get("extra_state", {}).items()
        }
        self._kept: dict[Any, Any] = {}
        if optimizer is not None:
            self._kept = unpack_optimizer(optimizer, names, state, unpacker)
        # Other ranks or devices have other random states; each rank keeps its own.
        alike = state["ranks"] == transport.world and state["device"] == transport.device.type
        same = continues and alike and optimizer is not None
        self._random = collect_random(transport) if same else {}
        self.tensors = collect_dense(list_state(model.module)) | unpacker.tensors | self._random
        model.tables.lease.discard()

    def finish(self) -> dict[str, Any]:
        """Returns the progress that was saved."""
        model, state = self._model, self._state
        model.tables.reload()
        restore_extra(model.module, self._extra)
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._kept)
        if self._random:
            restore_random(self._random, model.transport)
        progress: dict[str, Any] = state["progress"]
        return progress


# ---- from disk


def load_checkpoint(
    checkpoint: Intact,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer | None,
    continues: bool = True,
) -> dict[str, Any]:
    """As `Checkpoints.load`. A collective; returns the progress that was saved. If the run does not
    go on where it was (`continues`), another one begins with its model, whose tables may have more
    rows, with their initial values."""
    path, state, transport = checkpoint.path, checkpoint.state, model.transport
    place_as_saved(model, state, continues)
    refuse_other_model(path, state, model, optimizer, may_grow=not continues)
    reader = SafeReader(path)
    saved = run_on_all_ranks(transport, reader.list_tensors)
    restore = Restore(state, saved, model, optimizer, continues)
    smaller = [
        SmallerTable(name, state["tables"][name][0], model.tables)
        for name, spec in model.tables.specs.items()
        if state["tables"][name][0] != spec.rows
    ]
    tables = collect_tables(model.tables, model.tables.specs)
    for table in smaller:
        tables |= table.label_whole()
    own = restore.tensors | collect_shards(model.tables, model.tables.specs)
    mark_all_changed(model.tables)
    if checkpoint.ancestors:
        SafeReader(checkpoint.base.path).fill(tables, transport)
        parts = _list_parts(model, smaller)
        run_on_all_ranks(transport, lambda: apply_deltas(checkpoint.deltas, parts))
    else:
        own |= tables
    reader.fill(own, transport)
    for table in smaller:
        table.move()
    return restore.finish()


@dataclass(frozen=True)
class TablePart:
    """Rows [first, last) of a table in spread order: `rows`, and each tensor of their optimizer."""

    first: int
    last: int
    tensors: Mapping[str, Tensor]


def _list_parts(model: ShardedModel, smaller: Iterable[SmallerTable]) -> dict[str, TablePart]:
    """This rank's part of each table, as it was saved."""
    parts, tables = {}, model.tables
    for name in tables.specs:
        own = tables.get_group(name).rows.get_range(name)
        parts[name] = TablePart(own.first, own.last, tables.get_local_state(name))
    for table in smaller:
        parts[table.name] = TablePart(table.first, table.last, table.tensors)
    return parts


def apply_deltas(deltas: Iterable[Intact], parts: Mapping[str, TablePart]) -> None:
    """Writes the changes of each delta, in this order, into parts of the state before them."""
    for delta in deltas:
        reader = SafeReader(delta.path)
        for rank, spans in enumerate(delta.state["changed"]):
            for name, part in parts.items():
                _apply_span(reader, f"changed/{rank}/{name}", spans[name], part)


def _apply_span(reader: SafeReader, label: str, span: Span, part: TablePart) -> None:
    count, first, last = span
    if not count or last < part.first or first >= part.last:
        return
    names = {f"{label}/{name}": name for name in ("positions", *part.tensors)}
    for missing in names.keys() - reader.list_tensors().keys():
        raise ValueError(f"{reader.path} has no tensor {missing}, which its state.json names")
    read = read_tensors(reader, names.__contains__)
    values = {name: read[label] for label, name in names.items()}
    positions = values.pop("positions").long()
    inside = ((positions >= part.first) & (positions < part.last)).nonzero().view(-1)
    rows = positions[inside] - part.first
    for name, target in part.tensors.items():
        changed = values[name].index_select(0, inside)
        target.index_copy_(0, rows.to(target.device), changed.to(target.device))


def read_tensors(reader: SafeReader, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The `wanted` tensors of a checkpoint, whole, as they were saved. Not a collective."""
    saved = reader.list_tensors()
    tensors = {name: torch.empty_like(saved[name], device="cpu") for name in saved if wanted(name)}
    reader.fill(tensors)
    return tensors


# ---- from memory


def load_snapshot(
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    copy: Callable[[str, Tensor], object],
) -> dict[str, Any]:
    """Restores a rank from a memory file. A collective; returns the progress that was saved.
    `copy`: (name, to) -> copies a large tensor of the file."""
    tables = model.tables
    restore = Restore(state, tensors, model, optimizer)
    with torch.no_grad():
        for name, to in restore.tensors.items():
            to.copy_(tensors[name])
        for name in tables.specs:
            for part, to in tables.get_local_state(name).items():
                copy(f"table/{name}/{part}", to)
            for part, to in tables.get_group(name).rows.get_shard_tensors().items():
                to.copy_(tensors[f"shards/{name}/{part}"])
    progress = restore.finish()
    _restore_marks(state, tensors, model)
    return progress


def _restore_marks(
    state: Mapping[str, Any], tensors: Mapping[str, Tensor], model: ShardedModel
) -> None:
    """Restores what had changed for each consumer: its next delta holds all since its last."""
    groups = model.tables.groups
    mark_all_changed(model.tables)
    for number, consumer, label in state["marks"]:
        rows = groups[number].rows
        marks = np.unpackbits(tensors[label].numpy(), count=rows.size)
        rows.changed.set_marks(consumer, torch.from_numpy(marks).bool())
