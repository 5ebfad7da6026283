"""Exports a run as a folder that describes itself: weights as safetensors, settings, items,
vocabulary and features. `freescale.load` needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile, rmtree

from freescale.config.features import KEPT_SCHEMA
from freescale.data.features.store import FOLDER
from freescale.data.ingest.ids import VOCABULARY
from freescale.recommend.loading import EXPORT, load_model
from freescale.train.export import export_checkpoint, refuse_export
from freescale.train.run_folder import copy_file

_VERSION = 1


def export_run(
    folder: Path,
    out: Path,
    name: str | None = None,
    overwrite: bool = False,
    data: str | None = None,
) -> Iterator[Path]:
    """Writes a checkpoint of a run, named as for `find_checkpoint`, file by file.

    Raises:
        ValueError: `out` holds an export and `overwrite` is False, or the run's data is missing.
    """
    if not overwrite:
        refuse_export(out, "--overwrite")
    loaded = load_model(folder, name, data)
    found = loaded.checkpoint
    if found is None:
        raise ValueError(f"{folder} is an export already: name the folder of a run")
    (out / EXPORT).unlink(missing_ok=True)  # the last file: without it there is no export
    yield from export_checkpoint(found, out)
    (out / VOCABULARY).unlink(missing_ok=True)  # of an earlier export
    rmtree(out / FOLDER, ignore_errors=True)
    if loaded.vocabulary is not None:  # maps numbers in tables to texts
        yield copy_file(loaded.vocabulary, out / VOCABULARY)
    if loaded.features is not None:
        (out / FOLDER).mkdir()
        for path in sorted(loaded.features.list_files()):
            yield Path(copyfile(path, out / FOLDER / path.name))
        if (folder / KEPT_SCHEMA).is_file():
            yield Path(copyfile(folder / KEPT_SCHEMA, out / KEPT_SCHEMA))
    yield loaded.catalogue.write(out)
    yield Path(copyfile(folder / "config.json", out / "config.json"))
    about = {
        "version": _VERSION,
        "time_unit": loaded.time_unit,
        "step": found.state["progress"]["step"],
    }
    (out / EXPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    yield out / EXPORT
