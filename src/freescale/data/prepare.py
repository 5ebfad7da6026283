"""Turns interaction files into a histories file, and caches it by path and content of its
sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from freescale.config import DataConfig
from freescale.data.digest import compute_digest, read_contents
from freescale.data.histories import VERSION, HistoriesFile, is_histories
from freescale.data.history_builder import Progress, Spilled, build_histories
from freescale.data.interactions import read_interactions
from freescale.data.workspace import explain_full_disk, remove_dead_workspaces, workspace
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
    """Makes a histories file of interaction files, or finds it in the cache.

    Users with fewer than two events are dropped (and counted in the metadata). Events of equal
    timestamp keep the order of the file; exact duplicates are kept. String ids are numbered, and
    `vocabulary.parquet` beside the result says how.

    Args:
        source: An interaction file, several, or a histories file.
        cache: The folder of prepared data, which is found there by the paths and all bytes of its
            sources.
        format: `auto`, or one of `text_formats.FORMATS`.
        num_items: Rows of the item table; by default the largest id plus 1.
        progress: Called with a stage ("hash", "read", "sort", "write") and the share done.
        bucket_events: Events in memory at once, about.

    Returns:
        The path of the histories file; `source` itself if it is one.

    Raises:
        ValueError: A file is missing, damaged or not of the format, or an id is out of range.
        OSError: The disk is full; the message says how much is needed.
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
    sources = read_contents(
        interactions.paths, cache / "digests", lambda share: report("hash", share)
    )
    # A run goes on with the same data wherever it lies. The cache tells paths apart, since what it
    # holds names them in errors.
    fingerprint = compute_digest(
        [source.digest for source in sources], interactions.formats, num_items
    )
    key = compute_digest(VERSION, fingerprint, [str(path.resolve()) for path in interactions.paths])
    target = cache / key / "histories.parquet"
    remove_dead_workspaces(cache)
    if target.is_file():
        return target
    spilled = Spilled()
    work = f"preparing {interactions.paths[0]}"
    with explain_full_disk(
        cache, work, "make room, or name a cache folder on another disk", spilled.estimate_peak
    ):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock_cache(cache), workspace(cache, key) as folder:
            if target.is_file():  # another rank made it while this one waited
                return target
            made = build_histories(
                interactions, folder, num_items, fingerprint, report, bucket_events, spilled
            )
            for content in sources:
                content.check_unchanged()
            target.parent.mkdir(exist_ok=True)
            for path in made:  # the histories last: their presence says that all is there
                os.replace(path, target.parent / path.name)
    return target


@contextmanager
def _lock_cache(cache: Path) -> Iterator[None]:
    """Admits one process at a time, since the ranks of a machine all ask for the same file. The
    lock ends with its holder.

    NFS locks files but no folders. Where nothing can be locked, every rank makes the file, and the
    last one stays.
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
