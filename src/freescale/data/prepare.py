"""Turns interaction files into a histories file, once: the cache of what was made, by path and
content of the sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from freescale.config import DataConfig
from freescale.data.build import Progress, Spilled, build
from freescale.data.digest import contents, digest_of
from freescale.data.histories import VERSION, HistoriesFile, is_histories
from freescale.data.interactions import read_interactions
from freescale.data.workspace import clear, full_disk_named, workspace
from freescale.file_lock import lock

BUCKET_EVENTS = 2_000_000


def prepare(
    source: str | Path | Sequence[str | Path],
    cache: Path,
    format: str = DataConfig.format,
    num_items: int | None = DataConfig.num_items,
    progress: Progress | None = None,
    *,
    bucket_events: int = BUCKET_EVENTS,
) -> Path:
    """Path of the histories file of `source`: from the cache, or made now, or `source` itself if it
    is one already.

    Users with fewer than two events are dropped (and counted in the metadata). Events of equal
    timestamp keep the order of the file; exact duplicates are kept. String ids are numbered;
    `vocabulary.parquet` beside the result says how. Data is found in the cache by the paths and all
    bytes of its files. `progress` is called with a stage ("hash", "read", "sort", "write") and the
    share done.
    """
    cache, report = Path(cache), progress or (lambda stage, share: None)
    interactions = read_interactions(source, format)
    if num_items is not None and num_items < 1:
        raise ValueError(f"num_items is {num_items}; it must be 1 or more")
    if (
        len(interactions.paths) == 1
        and interactions.formats[0] == "parquet"
        and is_histories(interactions.paths[0])
    ):
        return HistoriesFile(interactions.paths[0], num_items).path
    sources = contents(interactions.paths, cache / "digests", lambda share: report("hash", share))
    # A run goes on with the same data wherever it lies. The cache tells paths apart, since what it
    # holds names them in errors.
    fingerprint = digest_of([source.digest for source in sources], interactions.formats, num_items)
    key = digest_of(VERSION, fingerprint, [str(path.resolve()) for path in interactions.paths])
    target = cache / key / "histories.parquet"
    clear(cache)
    if target.is_file():
        return target
    spilled = Spilled()
    work = f"preparing {interactions.paths[0]}"
    with full_disk_named(
        cache, work, "make room, or name a cache folder on another disk", spilled.most
    ):
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache), workspace(cache, key) as folder:
            if target.is_file():  # another rank made it while this one waited
                return target
            made = build(
                interactions, folder, num_items, fingerprint, report, bucket_events, spilled
            )
            for content in sources:
                content.check_unchanged()
            target.parent.mkdir(exist_ok=True)
            for path in made:  # the histories last: their presence says that all is there
                os.replace(path, target.parent / path.name)
    return target


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One process at a time: the ranks of a machine all ask for the same file. The lock ends with
    its holder, however it ends.

    NFS locks no folders but files; where nothing can be locked, ranks may each make the file, and
    the last one's stays.
    """
    with ExitStack() as stack:
        for path, flags in ((cache, os.O_RDONLY), (cache / "lock", os.O_RDWR | os.O_CREAT)):
            try:
                descriptor = os.open(path, flags, 0o666)
            except PermissionError:  # another user's
                continue
            stack.callback(os.close, descriptor)
            if lock(descriptor):
                break
        yield
