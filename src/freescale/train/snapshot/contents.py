"""What a rank puts into a snapshot: all that it needs to go on without another rank.

Unlike a checkpoint, which holds the run once, it is a rank's own: its part of sharded tables, and
whatever all ranks have alike.

    table/TABLE/PART            [rows of this rank, ...]: rows, and each tensor of their optimizer
    changed/TABLE/positions     [n], among this rank's rows; /PART: [n, ...], what they became
    shards/TABLE/PART           [shards of this rank, ...]: of a dynamic table, beside its rows
    marks/GROUP/NUMBER          bits: which rows have changed, for each consumer but this one
    rest/NAME                   dense weights, optimizer, random state, what compression carries
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.pipeline.dense.reducer import Reducer
from freescale.streams import record_event
from freescale.train.checkpoint.contents import collect_rest, copy_to_host
from freescale.train.checkpoint.model import collect_random

CONSUMER = "snapshots"  # under which rows are marked as changed


@dataclass
class SnapshotContents:
    """Of a snapshot, on this rank, in host memory. What the main thread updates is collected
    between two steps, rows of sharded tables once no gradients are deferred."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    delta: bool  # of the tables only the rows that have changed since the snapshot before
    marks: dict[str, Tensor]  # [rows], not yet as bits
    copied: torch.cuda.Event | None
    _model: ShardedModel | None
    _mark: list[int]  # the step, for tables whose rows come and go

    @staticmethod
    def collect(
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        reducer: Reducer | None,
        delta: bool,
    ) -> SnapshotContents:
        """Everything but the rows of sharded tables. From now on changes of rows are marked."""
        shared, state = collect_rest(model, optimizer, progress, reducer)
        rest = {f"rest/{name}": copy_to_host(value) for name, value in shared.items()}
        rest |= {f"rest/{name}": value for name, value in collect_random(model.transport).items()}
        state["marks"] = []
        contents = SnapshotContents(rest, state, delta, {}, None, model, model.tables.mark_state())
        contents._add("replicated")
        return contents

    def add_sharded(self) -> None:
        """The rows of sharded tables, as they are now. On the caller's thread and stream."""
        assert self._model is not None
        with self._model.tables.looking_back(self._mark):
            self._add("sharded")
        if self._model.transport.device.type == "cuda":
            self.copied = record_event(blocking=True)
        self._model = None

    def pack_marks(self) -> None:
        """Once all is copied: the marks become bits."""
        for name, marks in self.marks.items():
            self.tensors[name] = torch.from_numpy(np.packbits(marks.numpy()))
        self.marks = {}

    def _add(self, kind: str) -> None:
        """Tables of a placement."""
        assert self._model is not None
        tables = self._model.tables
        names = [name for name in tables.specs if tables.placements[name].kind == kind]
        for name in names:
            take = _collect_changes if self.delta else _collect_table
            self.tensors |= {key: _keep(value) for key, value in take(tables, name).items()}
            for part, value in tables.get_group(name).rows.get_shard_tensors().items():
                self.tensors[f"shards/{name}/{part}"] = value.clone()
        for number, group in enumerate(tables.groups):
            if not names or not any(tables.get_group(name) is group for name in names):
                continue
            changed = group.rows.changed
            for consumer in changed.consumers:
                if consumer != CONSUMER:
                    label = f"marks/{number}/{len(self.state['marks'])}"
                    self.state["marks"].append([number, consumer, label])
                    self.marks[label] = _keep(changed.get_marks(consumer))
            changed.follow(CONSUMER)


def _keep(value: Tensor) -> Tensor:
    """What is a copy already stays as it is."""
    return value if value.device.type == "cpu" else copy_to_host(value)


def _collect_table(tables: Tables, name: str) -> dict[str, Tensor]:
    return {
        f"table/{name}/{part}": value.clone() if value.device.type == "cpu" else value
        for part, value in tables.get_local_state(name).items()
    }


def _collect_changes(tables: Tables, name: str) -> dict[str, Tensor]:
    storage = tables.get_group(name).rows
    own = storage.get_range(name)
    local = storage.changed.find(CONSUMER, own.slice)
    if not local.numel():
        return {}
    kind = torch.int32 if own.last - own.first <= 1 << 31 else torch.int64
    found = {f"changed/{name}/positions": local.to(kind)}
    return found | {
        f"changed/{name}/{part}": value.index_select(0, local.to(value.device))
        for part, value in storage.get_tensors(name).items()
    }
