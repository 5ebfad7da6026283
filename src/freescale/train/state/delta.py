"""Deltas: rows of tables that changed since the parent checkpoint, with their optimizer state.

A rank writes the changed rows that it owns, by their positions in the spread order of the table
(embedding/layout.py), which depends on neither ranks nor placement:

    changed/RANK/TABLE/positions    [n], ascending; int32 where that is enough
    changed/RANK/TABLE/rows         [n, width], and likewise each tensor of the row optimizer

state.json has the count and the first and last position of each, so that a rank that restores
reads only the parts that overlap its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from freescale.embedding.layout import ShardLayout
from freescale.embedding.tables import Tables
from freescale.train.state.chain import Intact
from freescale.train.state.errors import explain_errors
from freescale.train.state.files import CheckpointFolder
from freescale.train.state.safe_reader import SafeReader

Span = list[int]  # [count, first position, last position] of a rank's changed rows of a table


def follow_changes(tables: Tables, consumer: str, names: Iterable[str] | None = None) -> None:
    """From now on row updates are marked for `consumer`; marks that it had are cleared. `names`:
    of these tables alone, which are all those of their groups."""
    for name in tables.specs if names is None else names:
        tables.get_group(name).rows.changed.follow(consumer)


def is_followed(tables: Tables, consumer: str) -> bool:
    return bool(tables.groups) and all(
        group.rows.changed.is_followed(consumer) for group in tables.groups
    )


@dataclass
class Parent:
    """A checkpoint since which changes of rows are marked."""

    step: int
    checksum: int  # of its state.json; rank 0's
    deltas: int  # since the last full one, itself included
    tables: Tables

    @staticmethod
    def of(step: int, checkpoint: Intact, tables: Tables) -> Parent:
        """What was loaded."""
        return Parent(step, checkpoint.checksum, len(checkpoint.ancestors), tables)

    def fits(self, tables: Tables, consumer: str, step: int, full_every: int) -> bool:
        """Whether the checkpoint of `step` may be a delta, as far as every rank knows."""
        return (
            self.tables is tables
            and self.step < step
            and self.deltas + 1 < full_every
            and is_followed(tables, consumer)
        )

    def is_in_place(self, files: CheckpointFolder) -> bool:
        """Whether the checkpoint is as it was saved, and still the last of the run. Rank 0's."""
        return files.steps()[-1:] == [self.step] and files.sum_state(self.step) == self.checksum


def mark_all_changed(tables: Tables) -> None:
    """For all consumers: the tables are replaced."""
    for group in tables.groups:
        group.rows.changed.mark_all()


def collect_changes(
    tables: Tables, consumer: str, names: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, Span]]:
    """(tensors by name, spans by table) of the marked rows that this rank answers for: of a
    sharded table its own, of a replicated one an equal share of the positions. The tensors are
    copies."""
    transport = tables.transport
    tensors: dict[str, Tensor] = {}
    spans: dict[str, Span] = {}
    for name in names:
        spec = tables.specs[name]
        storage = tables.get_group(name).rows
        own = storage.get_range(name)
        first, last = own.first, own.last
        if tables.placements[name].kind == "replicated":
            share = ShardLayout((spec,), transport.world)
            first, last = share.get_owned_range(0, transport.rank)
        begin = own.base + first - own.first
        local = storage.changed.find(consumer, slice(begin, begin + last - first))
        spans[name] = [
            local.numel(),
            *([first + int(local[i]) for i in (0, -1)] if len(local) else [0, 0]),
        ]
        if not local.numel():
            continue
        label = f"changed/{transport.rank}/{name}"
        positions = torch.int32 if spec.rows <= 1 << 31 else torch.int64
        tensors[f"{label}/positions"] = (local + first).to(positions)
        for part, value in storage.get_tensors(name).items():
            tensors[f"{label}/{part}"] = value.index_select(
                0, (local + (first - own.first)).to(value.device)
            )
    return tensors, spans


@dataclass(frozen=True)
class TablePart:
    """Positions [first, last) of a table, to be restored: `rows` and the state of its optimizer,
    each [last - first, ...]."""

    first: int
    last: int
    tensors: Mapping[str, Tensor]


def list_parts(tables: Tables) -> dict[str, TablePart]:
    """This rank's part of each table."""
    parts = {}
    for name in tables.specs:
        own = tables.get_group(name).rows.get_range(name)
        parts[name] = TablePart(own.first, own.last, tables.get_local_state(name))
    return parts


def apply_deltas(deltas: Iterable[Intact], parts: Mapping[str, TablePart]) -> None:
    """Writes the changes of each delta, in this order, into parts that hold the state before
    them."""
    for delta in deltas:
        reader = SafeReader(delta.path)
        for rank, spans in enumerate(delta.state["changed"]):
            for name, part in parts.items():
                _apply_span(delta, reader, f"changed/{rank}/{name}", spans[name], part)


def _apply_span(delta: Intact, reader: SafeReader, label: str, span: Span, part: TablePart) -> None:
    count, first, last = span
    if not count or last < part.first or first >= part.last:
        return
    metadata = reader.read_metadata().state_dict_metadata
    room: dict[str, Tensor] = {}
    for name in ("positions", *part.tensors):
        entry = metadata.get(f"{label}/{name}")
        if entry is None:
            raise ValueError(
                f"{delta.path} has no tensor {label}/{name}, which its state.json names"
            )
        room[name] = torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
    with explain_errors(f"checkpoint {delta.path} could not be read"):
        load(
            {f"{label}/{name}": value for name, value in room.items()},
            storage_reader=reader,
            no_dist=True,
        )
    positions = room.pop("positions").long()
    inside = ((positions >= part.first) & (positions < part.last)).nonzero().view(-1)
    local = positions[inside] - part.first
    for name, value in room.items():
        target = part.tensors[name]
        target.index_copy_(
            0, local.to(target.device), value.index_select(0, inside).to(target.device)
        )
