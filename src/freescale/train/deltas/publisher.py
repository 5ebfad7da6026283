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
from freescale.train.deltas.exports import compact, read_items, read_vocabulary
from freescale.train.deltas.folder import DeltaFolder, Manifest
from freescale.train.export import export_checkpoint, write_tensors
from freescale.train.export_folder import RunData, write_about, write_description
from freescale.train.state.disk import CheckpointFolder, read_state, sum_state
from freescale.train.state.intact import verify_checkpoint
from freescale.transport.local import LocalTransport
from freescale.transport.threads import start_thread


class Publisher:
    """Publishes in a folder. `open` once, then `publish` and `wait`; only on rank 0.

    Args:
        folder: `deltas` of the run.
        keep: how many deltas stay.
        data: of the run.
    """

    def __init__(self, folder: Path, keep: int, data: RunData) -> None:
        self.files, self._keep, self._data = DeltaFolder(folder), keep, data
        self._last: Manifest | None = None
        self._known: dict[str, RowIds] = {}
        self._items: Catalogue | None = None
        self._texts = 0  # of the vocabulary, that are published
        self._done = threading.Event()
        self._done.set()
        self._error: Exception | None = None

    def open(self, checkpoint: Path | None) -> None:
        """Continues what is in the folder, and publishes the checkpoint that the run continues from
        if it is not. What cannot be a delta to the last state becomes a full export."""
        self._last = self.files.find_last()
        if self._last is None or checkpoint is None:
            return
        state, published = read_state(checkpoint), self._last.about["checkpoint"]
        before = state.get("since", state.get("parent"))
        same = published == _identify(state)
        try:
            if not same and before != published:
                raise ValueError("another state")
            step = published["step"]
            path = CheckpointFolder(checkpoint.parent).path(step)
            found = verify_checkpoint(path, LocalTransport())
            if _identify(found.state) != published:
                raise ValueError("another state")
            chain = self.files.find_chain(self._last.number)
            self._items, vocabulary = read_items(chain), read_vocabulary(chain)
        except ValueError:
            self._known, self._items = {}, None
        else:
            self._known = RowIds.read_all(found)
            self._texts = 0 if vocabulary is None else len(vocabulary)
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
        state = read_state(checkpoint)
        if self._last is not None and self._last.about["checkpoint"] == _identify(state):
            return
        before = state.get("since", state.get("parent"))
        if self._last is None or self._items is None or before != self._last.about["checkpoint"]:
            self._publish_full(checkpoint)
        else:
            self._publish_delta(checkpoint, state)
        full, _ = self.files.list_numbers()
        assert self._last is not None
        if self._last.number - full[-1] >= self._keep:
            compact(self.files.folder)
        self.files.prune(self._keep)

    def _publish_full(self, checkpoint: Path) -> None:
        found, data = verify_checkpoint(checkpoint, LocalTransport()), self._data
        number = 0 if self._last is None else self._last.number + 1
        path = self.files.begin(number)
        self._known = RowIds.read_all(found)
        list(export_checkpoint(found, path))
        progress = found.state["progress"]
        texts = data.read_texts(progress)
        self._texts = 0 if texts is None else len(texts)
        self._items = data.list_items(self._describe_table(found.state), progress, texts)
        list(write_description(path, data.run, self._items, texts, data.features))
        self._finish(path, number, found.state, None)

    def _publish_delta(self, checkpoint: Path, state: dict[str, Any]) -> None:
        assert self._last is not None and self._items is not None
        number, parent = self._last.number + 1, self._last
        path = self.files.begin(number)
        dense, tables = read_changes(checkpoint, state, self._known)
        write_tensors(dense, path / "dense.safetensors")
        for name, change in tables.items():
            write_tensors(change, path / f"table.{name}.safetensors")
        if "item" in self._known:  # else every item has its row, and all counts are known
            self._write_items(path, state)
        own = {"number": parent.number, "checksum": parent.checksum}
        self._finish(path, number, state, own)

    def _write_items(self, path: Path, state: dict[str, Any]) -> None:
        """Writes what has changed, and the texts that came: a vocabulary only grows."""
        assert self._items is not None
        texts = self._data.read_texts(state["progress"])
        items = self._data.list_items(self._describe_table(state), state["progress"], texts)
        changed = compare_items(self._items, items)
        if changed is not None:
            pq.write_table(changed, path / ITEMS)
        if texts is not None and len(texts) > self._texts:
            pq.write_table(texts.slice(self._texts), path / VOCABULARY)
            self._texts = len(texts)
        self._items = items

    def _finish(
        self, path: Path, number: int, state: dict[str, Any], parent: dict[str, int] | None
    ) -> None:
        step = state["progress"]["step"]
        write_about(path, self._data.time_unit, step)
        about = {"step": step, "parent": parent, "checkpoint": _identify(state)}
        about["trained_until"] = state["progress"].get("trained_until")
        self._last = self.files.finish(path, number, about, full=parent is None)

    def _describe_table(self, state: dict[str, Any]) -> dict[str, Tensor]:
        if "item" in self._known:
            return {"ids": self._known["item"].list()}
        rows, width = state["tables"]["item"][:2]
        return {"weight": torch.empty(rows, width, device="meta")}


def _identify(state: dict[str, Any]) -> dict[str, int]:
    return {"step": state["progress"]["step"], "checksum": sum_state(state)}
