"""Turns interaction files into a histories file, once: the cache of what was made, by path and content of the sources."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from freescale.data.build import Progress, build
from freescale.data.histories import HistoriesFile, fingerprint_of, is_histories
from freescale.data.interactions import read_interactions

BUCKET_EVENTS = 2_000_000


def prepare(
    source: str | Path | Sequence[str | Path],
    cache: Path,
    format: str = "auto",
    num_items: int | None = None,
    progress: Progress | None = None,
    *,
    bucket_events: int = BUCKET_EVENTS,
) -> Path:
    """Path of the histories file of `source`: from the cache, or made now, or `source` itself if it is one already.

    Users with fewer than two events are dropped (and counted in the metadata). Events of equal timestamp keep the order
    of the file; exact duplicates are kept. String ids are numbered; `vocabulary.parquet` beside the result says how.
    `progress` is called with a stage ("read", "sort", "write") and the share done.
    """
    interactions = read_interactions(source, format)
    if num_items is not None and num_items < 1:
        raise ValueError(f"num_items is {num_items}; it must be 1 or more")
    if len(interactions.paths) == 1 and interactions.formats[0] == "parquet" and is_histories(interactions.paths[0]):
        return HistoriesFile(interactions.paths[0], num_items).path
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in interactions.paths]
    fingerprint = fingerprint_of(files, interactions.formats, num_items)
    target = Path(cache) / fingerprint / "histories.parquet"
    if target.is_file():
        return target
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    report = progress or (lambda stage, share: None)
    with _alone(Path(cache)), tempfile.TemporaryDirectory(dir=cache, prefix=f".{fingerprint}-") as folder:
        if target.is_file():  # another rank made it while this one waited
            return target
        made = build(interactions, Path(folder), num_items, fingerprint, report, bucket_events)
        target.parent.mkdir(exist_ok=True)
        for path in made:  # the histories last: their presence says that all is there
            os.replace(path, target.parent / path.name)
    return target


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One process at a time: the ranks of a machine all ask for the same file. The lock ends with its holder, however it ends."""
    folder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
