"""What a rank puts into a snapshot: all that it needs to go on without another rank.

Unlike a checkpoint, which holds the run once, it is a rank's own: its part of sharded tables, and
whatever all ranks have alike.

    table/TABLE/PART            [rows of this rank, ...]: rows, and each tensor of their optimizer
    changed/TABLE/positions     [n], among this rank's rows; /PART: [n, ...], what they became
    shards/TABLE/PART           [shards of this rank, ...]: of a dynamic table, beside its rows
    marks/GROUP/NUMBER          bits: which rows have changed, for each consumer but these
    rest/NAME                   dense weights, optimizer, random state, what compression carries

This rank's file has every table whole; `changed` is what a buddy receives in their place, if it
has the snapshot before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.changed_rows import ChangedRows
from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import Reducer
from freescale.train.state.contents import collect_rest
from freescale.train.state.model import collect_random, list_state
from freescale.train.state.state_copies import StateCopies
from freescale.train.state.state_file import StateFile

CONSUMER = "snapshots"  # under which rows are marked as changed, with the name of who wants them
SENT = f"{CONSUMER}/sent"


@dataclass
class SnapshotContents:
    """Of a snapshot, on this rank. What the main thread updates is collected between two steps,
    rows of sharded tables once no gradients are deferred: on CPUs straight into the file, from a
    GPU into host memory, until `write`."""

    tensors: dict[str, Tensor]  # all but the tables
    state: dict[str, Any]
    file: StateFile
    spare: StateFile | None  # that will be a copy of it, if the other one is not current
    changes: bool  # whether the file needs only the rows that have changed
    sends: str  # to a buddy: "nothing", "changes", "whole"
    copies: StateCopies  # to be finished before `write`
    sent: dict[str, Tensor] = field(default_factory=dict)  # by table: the rows that go there
    marks: dict[str, Tensor] = field(default_factory=dict)  # [rows], not yet as bits
    _failure: OSError | None = None
    _model: ShardedModel | None = None
    _mark: list[int] = field(default_factory=list)  # the step, of tables whose rows come and go
    _waiting: list[tuple[str, Tensor | None, Tensor]] = field(default_factory=list)

    @staticmethod
    def collect(
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        reducer: Reducer | None,
        file: StateFile,
        spare: StateFile | None,
        sends: str,
    ) -> SnapshotContents:
        """Everything but the rows of sharded tables. From now on changes of rows are marked."""
        listed = list_state(model.module)
        shared, state = collect_rest(model, listed, optimizer, progress, reducer)
        copies = StateCopies(model.transport.device)
        rest = copies.take_all({f"rest/{name}": value for name, value in shared.items()})
        rest |= {f"rest/{name}": value for name, value in collect_random(model.transport).items()}
        state["marks"] = []
        contents = SnapshotContents(rest, state, file, spare, file.current, sends, copies)
        contents._model, contents._mark = model, model.tables.lease.mark_state()
        file.begin()
        try:
            contents._add("replicated")
        except OSError as error:  # raised where the rows are waited for, on all ranks
            contents._failure = error
        return contents

    def add_sharded(self) -> None:
        """The rows of sharded tables, as they are now. On the caller's thread and stream."""
        assert self._model is not None
        if self._failure is not None:
            raise self._failure
        with self._model.tables.lease.looking_back(self._mark):
            self._add("sharded")
        self._model = None

    def write(self) -> None:
        """Once the copies are finished: rows that wait go into the file, and marks become bits."""
        for name, rows, value in self._waiting:
            if rows is None:
                self.file.fill(name, value)
            else:
                self.file.replace(name, rows, value, packed=True)
        self._waiting = []
        for name, marks in self.marks.items():
            self.tensors[name] = torch.from_numpy(np.packbits(marks.numpy()))
        self.marks = {}

    def list_changes(self) -> dict[str, Tensor]:
        """Once all is written: what a buddy that has the snapshot before lacks."""
        found = dict(self.tensors)
        for name, rows in self.sent.items():
            if not rows.numel():
                continue
            kind = torch.int32 if rows[-1] < 1 << 31 else torch.int64
            found[f"changed/{name}/positions"] = rows.to(kind)
            prefix = f"table/{name}/"
            for key, value in self.file.tables.items():
                if key.startswith(prefix) and "/" not in key.removeprefix(prefix):
                    part = key.removeprefix(prefix)
                    found[f"changed/{name}/{part}"] = value.index_select(0, rows)
        return found

    def _add(self, kind: str) -> None:
        """Tables of a placement."""
        assert self._model is not None
        tables = self._model.tables
        names = [name for name in tables.specs if tables.placements[name].kind == kind]
        for name in names:
            storage = tables.get_group(name).rows
            part_of_all = storage.get_range(name).slice
            changed = storage.changed
            rows = changed.find(self.file.consumer, part_of_all) if self.changes else None
            if self.sends == "changes":
                self.sent[name] = self._keep(changed.find(SENT, part_of_all))
            found = {f"table/{name}/{part}": of for part, of in storage.get_tensors(name).items()}
            self.file.reserve(found)
            for key, value in found.items():
                self._put(key, value, rows)
            for part, value in storage.get_shard_tensors().items():
                self.tensors[f"shards/{name}/{part}"] = self.copies.take(value)
        for number, group in enumerate(tables.groups):
            if any(tables.get_group(name) is group for name in names):
                self._take_marks(number, group.rows.changed)
        self.copies.seal()

    def _put(self, name: str, value: Tensor, rows: Tensor | None) -> None:
        if not _is_on_host(value):
            if rows is None:
                self._waiting.append((name, None, self.copies.take(value)))
            else:
                taken = self._keep(value.index_select(0, rows))
                self._waiting.append((name, self._keep(rows), taken))
        elif rows is None:
            self.file.fill(name, value)
        else:
            self.file.replace(name, rows.to("cpu"), value)

    def _keep(self, value: Tensor) -> Tensor:
        """What is a copy already."""
        return self.copies.take(value, is_copy=True)

    def _take_marks(self, number: int, changed: ChangedRows) -> None:
        """Of a group: those of others are kept, this one's begin anew."""
        for consumer in changed.consumers:
            if not consumer.startswith(CONSUMER):
                label = f"marks/{number}/{len(self.state['marks'])}"
                self.state["marks"].append([number, consumer, label])
                self.marks[label] = self._keep(changed.get_marks(consumer))
        changed.follow(self.file.consumer)
        if self.spare is not None:
            changed.follow(self.spare.consumer)
        if self.sends != "nothing":
            changed.follow(SENT)


def _is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"
