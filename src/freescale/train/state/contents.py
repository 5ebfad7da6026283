"""The contents of a state: everything that a run needs to continue, as named tensors and JSON.

    dense/NAME, optimizer/..., extra/...    the dense part and what trains it
    random/RANK/...                         random state of each rank
    table/TABLE/PART                        [rows, ...]: rows, and each tensor of their optimizer
    shards/TABLE/PART                       [virtual shards, ...]: of dynamic tables
    changed/...                             in place of table/...: only rows that have changed

A checkpoint has each tensor once, for all ranks. A snapshot is a rank's own: its part of sharded
tables, everything that all ranks have alike, and the marks of changed rows.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.changed_rows import ChangedRows
from freescale.embedding.layout import ShardLayout
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.train.state.copies import StateCopies
from freescale.train.state.memory import StateFile, group_tables
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
from freescale.train.state.packing import pack_optimizer, refuse_before_it_steps

CONSUMER = "snapshots"  # prefix of the consumers of row marks that belong to snapshots

Span = list[int]  # [count, first position, last position] of a rank's changed rows of a table


@dataclass(kw_only=True)
class Contents(ABC):
    """A rank's part of a state. `collect` reads what the main thread updates, between two steps;
    `add_sharded` the rows of sharded tables, once no gradients are deferred."""

    copies: StateCopies | None = None  # the tensors have their values once it is finished
    tensors: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)  # plain JSON
    untrained: set[str] = field(default_factory=set)  # tensors that may be infinite
    _model: ShardedModel | None = field(default=None, repr=False)  # until all is collected
    _mark: list[int] = field(default_factory=list)  # the step, for tables whose rows come and go

    def collect(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
    ) -> None:
        """Everything but the rows of sharded tables. From now on changes of rows are marked.
        ValueError names what a state cannot hold."""
        self._begin()
        listed = list_state(model.module)
        shared, state = _collect_rest(model, listed, optimizer, progress)
        self.state |= state
        self.tensors |= self.copies.copy_all(shared) if self.copies is not None else shared
        self.tensors |= collect_random(model.transport)  # copies
        self.untrained = find_untrained(listed)
        self._model, self._mark = model, model.tables.lease.mark_state()
        self._add("replicated")

    def add_sharded(self) -> None:
        """The rows of sharded tables, as they are now. On the caller's thread and stream."""
        assert self._model is not None
        with self._model.tables.lease.looking_back(self._mark):
            self._add("sharded")
        self._model = None

    def _add(self, kind: str) -> None:
        assert self._model is not None
        tables = self._model.tables
        names = [name for name in tables.specs if tables.placements[name].kind == kind]
        self._add_tables(tables, names)
        if self.copies is not None:
            self.copies.seal()

    def _begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Before anything is collected."""

    @abstractmethod
    def _add_tables(self, tables: Tables, names: list[str]) -> None:
        """Tables of one kind of placement, which are all those of their groups."""

    def _keep(self, value: Tensor) -> Tensor:
        """A tensor that is a copy already."""
        return value if self.copies is None else self.copies.copy(value, is_copy=True)


@dataclass(kw_only=True)
class DiskContents(Contents):
    """What a rank writes into a checkpoint.

    A delta, and a full one that is published, names changed rows by their positions in the spread
    order of the table (embedding/layout.py), which depends on neither ranks nor placement:

        changed/RANK/TABLE/positions    [n], ascending; int32 if that is enough
        changed/RANK/TABLE/rows         [n, width], and likewise each tensor of the row optimizer

    `spans` become part of its state.json: a rank that restores reads only what overlaps its own.
    """

    consumer: str | None = None  # changes of rows are marked for it from now on
    whole: bool = True  # the checkpoint contains all rows
    spans: dict[str, Span] | None = None  # changed rows of each table that this rank writes

    def _add_tables(self, tables: Tables, names: list[str]) -> None:
        copy = self.copies.copy if self.copies is not None else share
        if self.whole:
            self.tensors |= collect_tables(tables, names, copy)
        if self.spans is not None:
            for name in names:
                self.spans[name] = self._add_changes(tables, name)
        self.tensors |= collect_shards(tables, names, copy)
        if self.consumer is not None:
            follow_changes(tables, self.consumer, names)

    def _add_changes(self, tables: Tables, name: str) -> Span:
        """The marked rows that this rank answers for: its own of a sharded table, an equal share of
        the positions of a replicated one."""
        spec, transport = tables.specs[name], tables.transport
        storage = tables.get_group(name).rows
        own = storage.get_range(name)
        first, last = own.first, own.last
        if tables.placements[name].kind == "replicated":
            first, last = ShardLayout((spec,), transport.world).get_owned_range(0, transport.rank)
        begin = own.base + first - own.first
        assert self.consumer is not None
        local = storage.changed.find(self.consumer, slice(begin, begin + last - first))
        if not local.numel():
            return [0, 0, 0]
        span = [local.numel(), first + int(local[0]), first + int(local[-1])]
        label, rows = f"changed/{transport.rank}/{name}", local + (first - own.first)
        changed = _select_rows(label, storage.get_tensors(name), rows, local + first, spec.rows)
        self.tensors |= {part: self._keep(value) for part, value in changed.items()}
        return span


@dataclass(kw_only=True)
class MemoryContents(Contents):
    """What a rank puts into a snapshot. Its own file has every table whole: on CPUs rows are
    written straight into it, from a GPU they wait in host memory until `write`. A buddy, whose file
    is of the same step, receives what was written, with everything else:

        changed/TABLE/positions     [n], among this rank's rows; /PART: [n, ...], the new values
        marks/GROUP/NUMBER          bits: changed rows, for each consumer except snapshots
    """

    file: StateFile
    spare: StateFile | None = None  # becomes a copy of `file`, if it is not current
    since: int | None = None  # the step that the file had: it needs only what changed; None: all
    marks: dict[str, Tensor] = field(default_factory=dict)  # [rows], not yet as bits
    _rows: dict[str, Tensor] = field(default_factory=dict)  # by table, that have changed
    _waiting: list[tuple[str, str, Tensor]] = field(default_factory=list)  # (table, label, rows)

    def _begin(self) -> None:  # noqa: B027 - most have nothing to do
        self.since = self.file.step
        self.file.begin()
        self.state["marks"] = []

    def write(self) -> None:
        """Writes waiting rows into the file and packs marks, once the copies are finished."""
        for name, label, value in self._waiting:
            if self.since is None:
                self.file.fill(label, value)
            else:
                self.file.replace(label, self._rows[name], value, packed=True)
        self._waiting = []
        for name, marks in self.marks.items():
            self.tensors[name] = torch.from_numpy(np.packbits(marks.numpy()))
        self.marks = {}

    def list_changes(self) -> dict[str, Tensor]:
        """What a buddy lacks that has the tables of step `since`; once all is written."""
        found = dict(self.tensors)
        for name, parts in group_tables(self.file.tables).items():
            if (rows := self._rows[name]).numel():
                size = len(parts["rows"])
                found |= _select_rows(f"changed/{name}", parts, rows, rows, size)
        return found

    def _add_tables(self, tables: Tables, names: list[str]) -> None:
        assert self.copies is not None
        for name in names:
            storage = tables.get_group(name).rows
            part_of_all, changed = storage.get_range(name).slice, storage.changed
            rows = None
            if self.since is not None:
                rows = changed.find(self.file.consumer, part_of_all)
                self._rows[name] = self._keep(rows)
            parts = storage.get_tensors(name)
            self.file.reserve({f"table/{name}/{part}": value for part, value in parts.items()})
            for part, value in parts.items():
                self._put(name, f"table/{name}/{part}", value, rows)
            for part, value in storage.get_shard_tensors().items():
                self.tensors[f"shards/{name}/{part}"] = self.copies.copy(value)
        for number, group in enumerate(tables.groups):
            if any(tables.get_group(name) is group for name in names):
                self._add_marks(number, group.rows.changed)

    def _put(self, name: str, label: str, value: Tensor, rows: Tensor | None) -> None:
        assert self.copies is not None
        if not _is_on_host(value):
            waits = (
                self.copies.copy(value) if rows is None else self._keep(value.index_select(0, rows))
            )
            self._waiting.append((name, label, waits))
        elif rows is None:
            self.file.fill(label, value)
        else:
            self.file.replace(label, rows.to("cpu"), value)

    def _add_marks(self, number: int, changed: ChangedRows) -> None:
        """Keeps the marks of other consumers; those of snapshots begin anew."""
        for consumer in changed.consumers:
            if not consumer.startswith(CONSUMER):
                label = f"marks/{number}/{len(self.state['marks'])}"
                self.state["marks"].append([number, consumer, label])
                self.marks[label] = self._keep(changed.get_marks(consumer))
        changed.follow(self.file.consumer)
        if self.spare is not None:
            changed.follow(self.spare.consumer)


def _select_rows(
    label: str, parts: Mapping[str, Tensor], rows: Tensor, positions: Tensor, size: int
) -> dict[str, Tensor]:
    """Changed rows [n] of a table with these parts: their positions [n], of `size`, and values."""
    kind = torch.int32 if size <= 1 << 31 else torch.int64
    return {f"{label}/positions": positions.to(kind)} | {
        f"{label}/{part}": value.index_select(0, rows.to(value.device))
        for part, value in parts.items()
    }


def _is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def refuse_unsavable(model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError that names what a state cannot hold, before training."""
    listed = list_state(model.module)
    collect_dense(listed)
    pack_extra(listed, {})
    refuse_before_it_steps(optimizer, name_parameters(model))


def _collect_rest(
    model: ShardedModel,
    listed: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything except rows and random state: (tensors that share memory with the model's, plain
    JSON). `listed`: the result of `list_state`."""
    try:
        json.dumps(dict(progress))
    except TypeError as error:
        raise ValueError(f"progress must be plain JSON: {error}") from None
    transport, names = model.transport, name_parameters(model)
    tensors: dict[str, Tensor] = {}
    extra = pack_extra(listed, tensors)
    own, shared = pack_optimizer(optimizer, names, tensors)
    state = describe_model(model, listed, optimizer) | {"progress": dict(progress)}
    state |= {"ranks": transport.world, "device": transport.device.type}
    state |= {"optimizer_state": own, "optimizer_shared": shared, "extra_state": extra}
    if transport.device.type != "cpu":
        state["on_host"] = [name for name, value in tensors.items() if value.device.type == "cpu"]
    return collect_dense(listed) | tensors, state


# ---- which rows have changed


def follow_changes(tables: Tables, consumer: str, names: Iterable[str] | None = None) -> None:
    """From now on row updates are marked for `consumer`; marks that it had are cleared. `names`:
    only these tables, which are all those of their groups."""
    for name in tables.specs if names is None else names:
        tables.get_group(name).rows.changed.follow(consumer)


def is_followed(tables: Tables, consumer: str) -> bool:
    return bool(tables.groups) and all(
        group.rows.changed.is_followed(consumer) for group in tables.groups
    )


def mark_all_changed(tables: Tables) -> None:
    """Marks all rows for all consumers: the tables are replaced."""
    for group in tables.groups:
        group.rows.changed.mark_all()
