"""Exports a run as a folder that describes itself: weights as safetensors, settings, items,
vocabulary and features. `freescale.load` needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from freescale.recommend.approximate import ABOUT, INDEX, ApproximateIndex
from freescale.recommend.loading import Loaded, load_model
from freescale.recommend.recommender import Recommender, build_index
from freescale.recommend.requests import Requests
from freescale.recommend.serving_folder import remove_serving, write_serving
from freescale.stores.path import StorePath, writing
from freescale.stores.runs import open_run
from freescale.train.export import export_checkpoint, refuse_export
from freescale.train.export_folder import EXPORT, write_about

_MEASURED = 1000  # users whose ten best items an index is compared on


def export_run(
    folder: Path,
    out: Path,
    name: str | None = None,
    overwrite: bool = False,
    data: str | None = None,
    serving: bool = False,
    least_recall: float | None = None,
) -> Iterator[Path]:
    """Writes a checkpoint of a run, file by file.

    Args:
        folder: of the run.
        out: the folder to write.
        name: of the checkpoint, as for `find_checkpoint`.
        overwrite: whether to replace an export.
        data: where the run's data is, if it has moved.
        serving: with the files of `write_serving`.
        least_recall: with an index for approximate search that has this recall at least.

    Raises:
        ValueError: `out` holds an export and `overwrite` is False, the run's data is missing, or
            the model cannot be exported so.
    """
    if not overwrite:
        refuse_export(out, "--overwrite")
    folder = open_run(folder)
    if isinstance(out, StorePath):
        with writing(out, EXPORT) as place:
            for path in export_run(folder, place, name, True, data, serving, least_recall):
                yield out / path.relative_to(place)
        return
    loaded = load_model(folder, name, data)
    found = loaded.checkpoint
    if found is None:
        raise ValueError(f"{folder} is an export already: name the folder of a run")
    (out / EXPORT).unlink(missing_ok=True)  # the last file: without it there is no export
    yield from export_checkpoint(found, out)
    remove_serving(out)
    for name in (INDEX, ABOUT):
        (out / name).unlink(missing_ok=True)
    assert loaded.described is not None
    yield from loaded.described.write(out, loaded.catalogue, found.state["progress"])
    if least_recall is not None:
        yield from _make_index(loaded, least_recall).write(out)
    if serving:
        yield from write_serving(loaded, out)
    yield write_about(out, loaded.time_unit, found.state["progress"]["step"])


def _make_index(loaded: Loaded, least_recall: float) -> ApproximateIndex:
    """Measures it on users of the run's data, evenly spaced."""
    recommender = Recommender(loaded, torch.device("cpu"))
    if loaded.histories is None:
        return build_index(recommender, least_recall)
    people = recommender.known_users
    samples = np.linspace(0, len(people) - 1, min(_MEASURED, len(people))).astype(np.int64)
    queries = recommender.encode_requests(Requests(*people.read(samples)))
    listed = torch.from_numpy(loaded.catalogue.listed)
    return ApproximateIndex.build(recommender.item_vectors()[listed], queries, least_recall)
