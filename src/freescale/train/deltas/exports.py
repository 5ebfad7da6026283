"""Exports that are made of a full one and the deltas that follow it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from freescale.data.catalogue import ITEMS, Catalogue
from freescale.data.ingest.ids import VOCABULARY
from freescale.train.deltas.changes import apply_items, apply_table
from freescale.train.deltas.folder import DeltaFolder, Manifest, link_or_copy
from freescale.train.export import write_tensors
from freescale.train.export_folder import EXPORT, write_about

Weights = Mapping[str, dict[str, Tensor]]  # by file of an export, without its ending
_MERGED = {ITEMS, VOCABULARY, EXPORT}  # a delta has what changed of them


def read_weights(chain: Sequence[Manifest]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of each file, one file at a time."""
    for name in sorted(file for file in chain[0].about["files"] if file.endswith(".safetensors")):
        tensors: dict[str, Tensor] = {}
        for link in chain:
            if name in link.about["files"]:
                tensors = apply_weights(name, tensors, load_file(link.path / name))
        yield name.removesuffix(".safetensors"), tensors


def load_file(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def apply_weights(
    name: str, tensors: dict[str, Tensor], new: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A file after the one of the same name in a delta, or in a full export: the first."""
    return apply_table(tensors, new) if tensors and name.startswith("table.") else new


def read_items(chain: Sequence[Manifest]) -> Catalogue:
    items = Catalogue.read(chain[0].path)
    for link in chain[1:]:
        if ITEMS in link.about["files"]:
            items = apply_items(items, pq.read_table(link.path / ITEMS))
    return items


def read_vocabulary(chain: Sequence[Manifest]) -> pa.Table | None:
    """The texts of a full export, and those that came later."""
    parts = [pq.read_table(c.path / VOCABULARY) for c in chain if VOCABULARY in c.about["files"]]
    return pa.concat_tables(parts) if parts else None


def write_export(
    out: Path,
    full: Manifest,
    step: int,
    weights: Iterable[tuple[str, dict[str, Tensor]]],
    items: Catalogue,
    vocabulary: pa.Table | None,
) -> None:
    """Writes the export of a step. Files that no delta changes are links to those of a full export,
    if the file system has links."""
    (out / EXPORT).unlink(missing_ok=True)  # the last file: without it there is no export
    for name, tensors in weights:
        write_tensors(tensors, out / f"{name}.safetensors")
    items.write(out)
    if vocabulary is not None:
        pq.write_table(vocabulary, out / VOCABULARY)
    for name in full.about["files"]:
        if name not in _MERGED and not name.endswith(".safetensors"):
            (out / name).unlink(missing_ok=True)
            link_or_copy(full.path / name, out / name)
    about = json.loads((full.path / EXPORT).read_text(encoding="utf-8"))
    write_about(out, about["time_unit"], step)


def compact(folder: Path | str) -> Path:
    """Makes the last delta a full export, a table at a time, and returns its folder. Subscribers
    that are far behind take it. Deltas stay as they are."""
    files = DeltaFolder(Path(folder))
    chain = files.find_chain()
    last = chain[-1]
    if last.is_full:
        return last.path
    for link in chain:
        link.check_files()
    path = files.begin(last.number)
    items, vocabulary = read_items(chain), read_vocabulary(chain)
    write_export(path, chain[0], last.step, read_weights(chain), items, vocabulary)
    kept = {name: last.about[name] for name in ("step", "checkpoint")}
    about = {**kept, "parent": None, "stands_for": last.checksum}
    return files.finish(path, last.number, about, full=True).path
