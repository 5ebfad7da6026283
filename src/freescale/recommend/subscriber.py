"""Follows what a run publishes while it trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from freescale.config import RunConfig
from freescale.data.catalogue import ITEMS, Catalogue
from freescale.data.features.store import ABOUT, FOLDER, FeatureStore
from freescale.data.ingest.ids import VOCABULARY
from freescale.recommend.loading import Loaded, build_plain
from freescale.recommend.recommender import Recommender
from freescale.train.deltas.changes import apply_items, apply_table
from freescale.train.deltas.folder import DeltaFolder, Manifest, Missing
from freescale.train.export import write_tensors
from freescale.train.export_folder import EXPORT, write_about
from freescale.train.state.disk import Damaged

T = TypeVar("T")


@dataclass(frozen=True)
class _State:
    last: Manifest
    weights: dict[str, dict[str, Tensor]]  # weights by file of an export, without its ending
    items: Catalogue
    vocabulary: pa.Table | None


class Subscriber:
    """The model that a run publishes with `--deltas`, brought up to date with `update`.

    `folder`: of the run, or its folder `deltas`; ValueError if it has no full export. Everything is
    verified before it counts: after an error the state is that of the last good delta.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        self._files = DeltaFolder(path / "deltas" if (path / "deltas").is_dir() else path)
        if not self._files.list_numbers()[0]:
            raise Missing(
                f"{folder} has published nothing: train with --deltas, and wait for the first "
                "checkpoint"
            )
        self._state = self._read_full(self._begin)
        self.update()

    @property
    def last(self) -> Manifest:
        """What was applied last: its `number`, `step` and other facts (`about`)."""
        return self._state.last

    @property
    def number(self) -> int:
        return self.last.number

    def update(self) -> int:
        """Applies the deltas that have come, or takes a full export if one is missing or damaged.
        Returns how many states later the model is.

        Raises:
            Missing: a delta was removed before it was applied, and no full export contains it.
            Damaged: a file is not as it was written.
        """
        before = self.number
        while True:
            full, deltas = self._files.list_numbers()
            following = self.number + 1
            if max([*full, *deltas], default=-1) < following:
                return self.number - before
            try:
                if following not in deltas:
                    raise Missing(f"{self._files.path(following)} is missing")
                self._state = self._apply(self._files.read(following))
            except (Missing, Damaged, FileNotFoundError) as error:
                if not full or full[-1] < following:
                    raise Missing(str(error)) if isinstance(error, OSError) else error from None
                self._state = self._read_full(self._begin)

    def load(self, device: str | torch.device = "cpu") -> Recommender:
        """The model as it is now, which later updates do not change."""
        return self._read_full(lambda number: self._load(number, torch.device(device)))

    def _load(self, number: int, device: torch.device) -> Recommender:
        folder, state = self._files.path(number, full=True), self._state
        has_features = (folder / FOLDER / ABOUT).is_file()
        features = FeatureStore(folder / FOLDER) if has_features else None
        config, weights = RunConfig.read(folder), dict(state.weights)
        if features is not None and config.data.follow and state.vocabulary is not None:
            features = features.adopt(state.vocabulary)
        if features is not None:  # the features of items are added to their rows
            item = weights["table.item"]
            weights["table.item"] = item | {"weight": item["weight"].clone()}
        vocabulary = folder / VOCABULARY if (folder / VOCABULARY).is_file() else None
        module = build_plain(config, weights, state.items, features)
        more = vocabulary, None, _read_unit(folder), None
        given = folder, config, module, state.items, features, *more
        return Recommender(Loaded(*given, texts=state.vocabulary), device)

    def write(self, folder: str | Path) -> Path:
        """Writes the model as it is now as an export, equal to one of the run at this step."""
        return self._read_full(lambda number: self._write(number, Path(folder)))

    def _write(self, number: int, out: Path) -> Path:
        source, state = self._files.read(number, full=True), self._state
        out.mkdir(parents=True, exist_ok=True)
        (out / EXPORT).unlink(missing_ok=True)  # the last file: without it there is no export
        for name, tensors in state.weights.items():
            write_tensors(tensors, out / f"{name}.safetensors")
        state.items.write(out)
        if state.vocabulary is not None:
            pq.write_table(state.vocabulary, out / VOCABULARY)
        for name in source.about["files"]:  # settings and features, which stay
            if name not in (ITEMS, VOCABULARY, EXPORT) and not name.endswith(".safetensors"):
                (out / name).parent.mkdir(exist_ok=True)
                copyfile(source.path / name, out / name)
        write_about(out, _read_unit(source.path), self.last.step)
        return out

    def compact(self) -> Path:
        """Publishes the model as it is now as a full export, which subscribers take that are far
        behind. For a run that has ended: while it trains, it does so by itself."""
        last = self.last
        if last.about["parent"] is None:
            return last.path
        about = {name: last.about[name] for name in ("step", "trained_until", "checkpoint")}
        about |= {"parent": None, "stands_for": last.checksum}
        path = self.write(self._files.begin(last.number))
        return self._files.finish(path, last.number, about).path

    def _read_full(self, read: Callable[[int], T]) -> T:
        """Reads the newest full export; a later one if the run removes it meanwhile."""
        while True:
            number = self._files.list_numbers()[0][-1]
            try:
                return read(number)
            except (FileNotFoundError, Damaged):
                if self._files.list_numbers()[0][-1] == number:
                    raise

    def _begin(self, number: int) -> _State:
        """The state of a full export."""
        link = self._files.read(number, full=True)
        link.check_files()
        weights = {path.stem: load_file(path) for path in link.path.glob("*.safetensors")}
        texts = link.path / VOCABULARY
        vocabulary = pq.read_table(texts) if texts.is_file() else None
        return _State(link, weights, Catalogue.read(link.path), vocabulary)

    def _apply(self, link: Manifest) -> _State:
        """The state after a delta."""
        link.check_parent(self.last)
        link.check_files()
        state = self._state
        weights, items, vocabulary = dict(state.weights), state.items, state.vocabulary
        for path in link.path.glob("*.safetensors"):
            change, table = load_file(path), path.name.startswith("table.")
            weights[path.stem] = apply_table(weights[path.stem], change) if table else change
        if ITEMS in link.about["files"]:
            items = apply_items(items, pq.read_table(link.path / ITEMS))
        if VOCABULARY in link.about["files"]:
            parts = [] if vocabulary is None else [vocabulary]
            vocabulary = pa.concat_tables([*parts, pq.read_table(link.path / VOCABULARY)])
        return _State(link, weights, items, vocabulary)


def _read_unit(folder: Path) -> str | None:
    about = json.loads((folder / EXPORT).read_text(encoding="utf-8"))
    return about["time_unit"]  # type: ignore[no-any-return]


def load_file(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
