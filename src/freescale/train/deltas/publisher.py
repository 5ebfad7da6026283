"""Publishes the checkpoints of a run, on rank 0, on a thread alongside training.

Everything comes from the files of a checkpoint that is in its place: no step and no other rank does
anything for it, and what a resumed run publishes follows from its checkpoint.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from freescale.data.catalogue import ITEMS, Catalogue
from freescale.data.ingest.ids import VOCABULARY
from freescale.train.deltas.changes import RowIds, compare_items, read_changes
from freescale.train.deltas.folder import DeltaFolder, Manifest
from freescale.train.export import export_checkpoint, write_tensors
from freescale.train.export_folder import RunData, write_about
from freescale.train.state.disk import CheckpointFolder, read_state, sum_state
from freescale.train.state.intact import Intact, verify_checkpoint
from freescale.transport.local import LocalTransport
from freescale.transport.threads import start_thread


class Publisher:
    """Publishes in the folder `deltas` of a run and keeps the last few deltas. `open` once, then
    `publish` and `wait`; only on rank 0."""

    def __init__(self, folder: Path, keep: int, data: RunData) -> None:
        self.files, self._keep, self._data = DeltaFolder(folder), keep, data
        self._last: Manifest | None = None
        # ids of the last published state, by table
        self._known: dict[str, RowIds] = {}
        self._items: Catalogue | None = None  # None: the next one can only be full
        self._texts = 0
        self._done = threading.Event()
        self._done.set()
        self._error: Exception | None = None

    def open(self, checkpoint: Path | None) -> None:
        """Continues what is in the folder, and publishes the checkpoint that the run continues from
        if it is not. What cannot be a delta to the last state becomes a full export."""
        full, deltas = self.files.list_numbers()
        if not full or checkpoint is None:
            return
        number = max([*full, *deltas])
        self._last = self.files.read(number, full=number not in deltas)
        published = self._last.about["checkpoint"]
        before = CheckpointFolder(checkpoint.parent).path(published["step"])
        try:  # it is the checkpoint, or the one before it
            if sum_state(read_state(before)) == published["checksum"]:
                self._adopt(_verify(before))
        except ValueError:
            pass  # gone or damaged
        self._publish(checkpoint)

    def publish(self, checkpoint: Path) -> None:
        """Begins to publish a checkpoint."""
        self._done.clear()

        def work() -> None:
            try:
                self._publish(checkpoint)
            except Exception as error:
                self._error = error
            self._done.set()

        start_thread("deltas", work, lambda: None)

    def wait(self) -> None:
        """Until it is published. Raises what went wrong."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise ValueError(f"{self.files.folder}: cannot publish: {error}") from error

    def _publish(self, checkpoint: Path) -> None:
        state, last = read_state(checkpoint), self._last
        published = None if last is None else last.about["checkpoint"]
        if published == _identify(state):
            return
        if self._items is not None and published == state.get("since", state.get("parent")):
            self._publish_delta(checkpoint, state)
        else:
            found = _verify(checkpoint)
            self._adopt(found)
            self._last = self._write_full(found, 0 if last is None else last.number + 1)
        assert self._last is not None
        if self._last.number - self.files.list_numbers()[0][-1] >= self._keep:
            own = self._last.number, self._last.checksum
            self._write_full(_verify(checkpoint), *own)  # full export for late subscribers
        self.files.prune(self._keep)

    def _adopt(self, found: Intact) -> None:
        """Goes on from a checkpoint."""
        self._known = RowIds.read_all(found)
        texts = self._data.read_texts(found.state["progress"])
        self._items = self._list_items(found.state)
        self._texts = 0 if texts is None else len(texts)

    def _write_full(self, found: Intact, number: int, stands_for: int | None = None) -> Manifest:
        path = self.files.begin(number)
        list(export_checkpoint(found, path))
        assert self._items is not None
        list(self._data.write(path, self._items, found.state["progress"]))
        more = {} if stands_for is None else {"stands_for": stands_for}
        return self._finish(path, number, found.state, {"parent": None, **more})

    def _publish_delta(self, checkpoint: Path, state: dict[str, Any]) -> None:
        assert self._last is not None and self._items is not None
        path = self.files.begin(self._last.number + 1)
        dense, tables = read_changes(checkpoint, state, self._known)
        write_tensors(dense, path / "dense.safetensors")
        for name, change in tables.items():
            write_tensors(change, path / f"table.{name}.safetensors")
        if "item" in self._known:  # else every item has its row, and all counts are known
            items, texts = self._list_items(state), self._data.read_texts(state["progress"])
            if (changed := compare_items(self._items, items)) is not None:
                pq.write_table(changed, path / ITEMS)
            if texts is not None and len(texts) > self._texts:  # a vocabulary only grows
                pq.write_table(texts.slice(self._texts), path / VOCABULARY)
                self._texts = len(texts)
            self._items = items
        parent = {"number": self._last.number, "checksum": self._last.checksum}
        self._last = self._finish(path, self._last.number + 1, state, {"parent": parent})

    def _finish(
        self, path: Path, number: int, state: dict[str, Any], about: dict[str, Any]
    ) -> Manifest:
        step, until = state["progress"]["step"], state["progress"].get("trained_until")
        write_about(path, self._data.time_unit, step)
        about |= {"step": step, "trained_until": until, "checkpoint": _identify(state)}
        return self.files.finish(path, number, about)

    def _list_items(self, state: dict[str, Any]) -> Catalogue:
        rows, width = state["tables"]["item"][:2]
        table: dict[str, Tensor] = {"weight": torch.empty(rows, width, device="meta")}
        if "item" in self._known:
            table = {"ids": self._known["item"].list()}
        return self._data.list_items(table, state["progress"])


def _identify(state: dict[str, Any]) -> dict[str, int]:
    return {"step": state["progress"]["step"], "checksum": sum_state(state)}


def _verify(checkpoint: Path) -> Intact:
    return verify_checkpoint(checkpoint, LocalTransport())
