"""What changes from one state of a model to the next, by ids: read from a checkpoint that names the
changed rows, and applied to the tensors of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.data.catalogue import Catalogue
from freescale.embedding.dynamic_rules import DEFAULT_ID
from freescale.embedding.layout import find_ids
from freescale.train.state.intact import Intact
from freescale.train.state.restore import TablePart, apply_deltas, read_tensors
from freescale.train.torch_files.safe_reader import SafeReader

_DYNAMIC = 5  # entries about a table whose rows come and go, at least


@dataclass
class RowIds:
    """Which ids have the rows of a dynamic table, by position."""

    ids: Tensor  # [rows]
    used: Tensor  # [rows] bool

    @staticmethod
    def read_all(checkpoint: Intact) -> dict[str, RowIds]:
        """Of each dynamic table of a checkpoint."""
        found, reader = {}, SafeReader(checkpoint.base.path)
        for name, about in checkpoint.state["tables"].items():
            if len(about) >= _DYNAMIC:
                names = {f"table/{name}/{part}": part for part in ("ids", "last_use")}
                stored = read_tensors(reader, names.__contains__)
                parts = {names[label]: value.flatten(0, 1) for label, value in stored.items()}
                apply_deltas(checkpoint.deltas, {name: TablePart(0, about[0], parts)})
                found[name] = RowIds(parts["ids"], parts["last_use"] >= 0)
        return found

    def list(self) -> Tensor:
        """The ids that have a row, ascending, without that of the default row."""
        ids = self.ids[self.used]
        return ids[ids != DEFAULT_ID].sort().values

    def replace(self, positions: Tensor, ids: Tensor, used: Tensor) -> Tensor:
        """The rows at some positions have these ids now. Returns the ids that have lost theirs."""
        before = self.ids[positions][self.used[positions]]
        self.ids[positions], self.used[positions] = ids, used
        return before[~torch.isin(before, ids[used])].sort().values


def read_changes(
    path: Path, state: Mapping[str, object], known: Mapping[str, RowIds]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """What a checkpoint changes: its dense weights, and for each table `ids` [n] ascending and
    `weight` [n, width], for a dynamic one also `removed` [m] and, if it has changed, `default`
    [1, width]. `state`: its state.json; `known`: of the checkpoint before, brought up to date."""
    reader, tables = SafeReader(path), {}
    saved = read_tensors(reader, lambda name: name.startswith("dense/"))
    dense = {name.removeprefix("dense/"): value for name, value in saved.items()}
    spans: Sequence[Mapping[str, Sequence[int]]] = state["changed"]  # type: ignore[assignment]
    about: Mapping[str, Sequence[int]] = state["tables"]  # type: ignore[assignment]
    for name, (rows, *_) in about.items():
        parts = ("positions", "rows", *(("ids", "last_use") if name in known else ()))
        labels = {
            f"changed/{rank}/{name}/{part}": part
            for rank, of in enumerate(spans)
            if of[name][0]
            for part in parts
        }
        if not labels:
            continue
        read = read_tensors(reader, labels.__contains__)
        found = {
            p: torch.cat([read[label] for label in labels if labels[label] == p]) for p in parts
        }
        positions, weight = found["positions"].long(), found["rows"]
        if name not in known:
            tables[name] = _sort(find_ids(positions, rows), weight)
            continue
        used = found["last_use"] >= 0
        removed = known[name].replace(positions, found["ids"], used)
        changed = _sort(found["ids"][used], weight[used])
        default = changed["ids"] == DEFAULT_ID
        tables[name] = {part: tensor[~default] for part, tensor in changed.items()}
        tables[name]["removed"] = removed
        if default.any():
            tables[name]["default"] = changed["weight"][default]
    return dense, tables


def _sort(ids: Tensor, weight: Tensor) -> dict[str, Tensor]:
    order = ids.argsort()
    return {"ids": ids[order], "weight": weight.index_select(0, order)}


def apply_table(table: dict[str, Tensor], change: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a table of an export, with a change; the given ones stay as they are."""
    ids, weight = change["ids"], change["weight"]
    if "ids" not in table:  # a row for every id
        return table | {"weight": table["weight"].index_copy(0, ids, weight)}
    kept = ~torch.isin(table["ids"], torch.cat([ids, change["removed"]]))
    joined = _sort(torch.cat([table["ids"][kept], ids]), torch.cat([table["weight"][kept], weight]))
    default = {"default": change["default"]} if "default" in change else {}
    return table | joined | default


# ---- items


def compare_items(before: Catalogue, now: Catalogue) -> pa.Table | None:
    """The items that are new or changed, by key, and those that are gone, without events; None if
    there are none."""
    old, new = _find_keys(before), _find_keys(now)
    place = np.searchsorted(old, new).clip(max=max(len(old) - 1, 0))
    same = np.zeros(len(new), bool)
    if len(old):
        ids = before.ids.take(pa.array(place)).cast(now.ids.type)
        nulls = pc.and_(ids.is_null(), now.ids.is_null())
        equal = np.asarray(pc.or_(nulls, pc.fill_null(pc.equal(ids, now.ids), False)))
        same = (old[place] == new) & (before.events[place] == now.events) & equal
    rows, gone = np.flatnonzero(~same), np.setdiff1d(old, new)
    if not len(rows) and not len(gone):
        return None
    kind, counts = now.ids.type, pa.array(now.events[rows], pa.int64())
    return pa.table(
        {
            "key": np.concatenate([new[rows], gone]),
            "id": pa.concat_arrays([now.ids.take(pa.array(rows)), pa.nulls(len(gone), kind)]),
            "events": pa.concat_arrays([counts, pa.nulls(len(gone), pa.int64())]),
        }
    )


def apply_items(before: Catalogue, change: pa.Table) -> Catalogue:
    """The items after a change of `compare_items`."""
    change = change.combine_chunks()
    old, keys = _find_keys(before), change.column("key").to_numpy()
    kept, stays = ~np.isin(old, keys), np.asarray(change.column("events").is_valid())
    merged = np.concatenate([old[kept], keys[stays]])
    order = np.argsort(merged, kind="stable")
    events = change.column("events").filter(pa.array(stays)).to_numpy()
    ids = [before.ids.filter(pa.array(kept)), change.column("id").combine_chunks()]
    ids[1] = ids[1].filter(pa.array(stays)).cast(ids[0].type)
    return Catalogue(
        pa.concat_arrays(ids).take(pa.array(order)),
        np.concatenate([before.events[kept], events])[order],
        None if before.keys is None else merged[order],
    )


def _find_keys(items: Catalogue) -> NDArray[np.int64]:
    return np.arange(len(items)) if items.keys is None else items.keys
