"""Builds a histories file from interactions in any order and of any size.

Two recursive external partitions bound the memory by a bucket of events (or the longest single
history): by hash of the user, to bring each history together and sort it; then by range of (last
timestamp, user), to order the users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from freescale.data.histories import HistoriesMetadata, count_events
from freescale.data.histories_writer import HistoriesWriter, make_schema
from freescale.data.ingest.ids import VOCABULARY, ReadDifferently, is_huge
from freescale.data.ingest.interactions import Interactions
from freescale.data.workspace import Progress
from freescale.random import derive, integers

_LAST = "\0last"  # a user's last timestamp; no file has such a column name
_FAN_OUT = 128  # files open at once in a partition
_SAMPLES = 64  # order samples per bucket, which even out the second partition


def partition(
    batches: Iterable[pa.RecordBatch],
    part: Callable[[pa.RecordBatch], NDArray[Any]],
    parts: int,
    folder: Path,
) -> list[tuple[Path, int]]:
    """Writes each row to the Arrow file of its part. Returns path and rows of each part."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{p}.arrow" for p in range(parts)]
    counts = np.zeros(parts, np.int64)
    with ExitStack() as stack:
        writers: list[pa.ipc.RecordBatchStreamWriter] = []
        for batch in batches:
            if not writers:
                for path in paths:
                    sink = stack.enter_context(pa.OSFile(str(path), "wb"))
                    writers.append(stack.enter_context(pa.ipc.new_stream(sink, batch.schema)))
            belongs = part(batch)
            order = np.argsort(belongs, kind="stable")
            sizes = np.bincount(belongs, minlength=parts)
            ordered, start = batch.take(pa.array(order)), 0
            for p in np.flatnonzero(sizes):
                writers[p].write_batch(ordered.slice(start, sizes[p]))
                start += sizes[p]
            counts += sizes
    return list(zip(paths, counts.tolist(), strict=True))


def spill(tables: Iterable[pa.Table], path: Path) -> None:
    """Writes tables of one schema to a file; no tables, no file."""
    with ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None:
                sink = stack.enter_context(pa.OSFile(str(path), "wb"))
                writer = stack.enter_context(pa.ipc.new_stream(sink, table.schema))
            writer.write_table(table)


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a file."""
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def describe_interactions(interactions: Interactions) -> list[str]:
    """Report lines after reading: the roles of columns, and what was left out."""
    layout, files = interactions.layouts[0], interactions.files
    parts = []
    for role, name in (("user", "user_id"), ("item", "item_id"), ("action", "action")):
        if role in layout.roles:
            by_line = role == "user" and layout.format == "sequences"
            source = "line" if by_line else layout.roles[role]
            parts.append(f"{source} -> {role} ({_describe_ids(interactions, name)})")
    times = interactions.times.get(files[0])
    parts.append(f"{times.column} -> time ({times.meaning})" if times else "order -> time")
    if "rating" in layout.roles:
        parts.append(f"{layout.roles['rating']} -> action (twice the rating, rounded)")
    if layout.feedback:
        how = "" if layout.format == "yambda" else " (as bits)"
        parts.append(f"{', '.join(layout.feedback)} -> action{how}")
    parts += [f"{label.text} -> label" for label in interactions.labels]
    parts += [f"{column} -> feature" for column in interactions.features.values()]
    several = len(files) > 1
    about = f"{layout.format}, {len(files):,} files" if several else layout.format
    lines = [f"{files[0]}{' ...' if several else ''} ({about}): {', '.join(parts)}"]
    kept, incomplete = interactions.sides
    used = {*layout.roles.values(), *layout.feedback, *kept}
    used |= {label.column for label in interactions.labels} | set(interactions.features.values())
    if left := [name for name in layout.names if name not in used]:
        gaps = [name for name in incomplete if name in left]
        why = f" (with missing values: {', '.join(gaps)})" if gaps else ""
        shown = ", ".join(name or "one without a name" for name in left)
        lines.append(f"columns left out: {shown}{why}")
    if count := interactions.empty_files:
        lines.append(f"{count:,} empty file{'s' if count > 1 else ''} left out")
    if interactions.missing_rows:
        lines.append(f"{interactions.missing_rows:,} rows without user, item or time left out")
    return lines


def _describe_ids(interactions: Interactions, name: str) -> str:
    if name == "item_id" and interactions.hashed is not None:
        return interactions.hashed.describe()
    if name not in interactions.reading.coded:
        return "integers"
    count, reason = len(interactions.vocabulary.columns[name]), interactions.reading.coded[name]
    return f"{count:,} {reason}" if reason == "strings" else f"{count:,} {reason}; numbered anew"


def build_histories(
    interactions: Interactions,
    folder: Path,
    num_items: int | None,
    make_fingerprint: Callable[[], str],
    report: Progress,
    limit: int,
) -> list[Path]:
    """Writes histories.parquet and, if ids are strings, vocabulary.parquet. Returns their paths,
    the histories last. ReadDifferently if the file must be read in another way; ValueError if an id
    is out of range, or no user has two events.

    `folder` is also where events are spilled. `num_items`: rows of the item table; None: the
    largest id plus 1. `make_fingerprint` returns that of the sources, once they have been read.
    `limit`: events of a bucket, about.
    """
    largest, events, dropped = -1, 0, 0

    def count_as_read() -> Iterator[pa.RecordBatch]:
        nonlocal largest, events
        for batch in interactions:
            if interactions.hashed is None:
                largest = max(largest, int(batch.column("item_id").to_numpy().max()))
            if num_items is not None and largest >= num_items:
                raise ValueError(
                    f"{interactions.files[0]}: item id {largest} is not below num_items "
                    f"{num_items}; raise num_items or leave it out"
                )
            events += batch.num_rows
            report("read", interactions.fraction)
            yield batch
        interactions.refuse_unknown()
        bounded = num_items is not None or interactions.hashed is not None
        if not bounded and is_huge(largest, events):
            reading = interactions.reading.code("item_id", f"integers up to {largest:,}")
            raise ReadDifferently(f"item ids reach {largest}", reading)

    # Histories of one bucket after another, cut to users with two events; order samples on the way.
    samples: list[NDArray[Any]] = []
    kept_events = kept_users = 0

    def make_histories() -> Iterator[pa.Table]:
        nonlocal kept_events, kept_users, dropped
        done = 0
        rows = _estimate_rows(interactions)
        for table in _partition_by_user(count_as_read(), rows, folder, limit):
            done += table.num_rows
            table, short = _group_events(table)
            dropped += short
            kept_users += table.num_rows
            kept_events += int(count_events(table.column("item_id")).sum())
            samples.append(_sample_order(table, max(limit // _SAMPLES, 1)))
            report("sort", done / events)
            yield table

    unordered = folder / "unordered.arrow"
    spill(make_histories(), unordered)
    if kept_users == 0:
        raise ValueError(
            f"{interactions.files[0]}: no user has 2 or more events ({dropped} users "
            "with one); give a longer log"
        )
    largest = max(largest, len(interactions.vocabulary.columns.get("item_id", ())) - 1)
    order = np.unique(np.concatenate(samples), axis=0)  # [samples, 2]: (last timestamp, user)
    schema, hashed = _read_schema(unordered), interactions.hashed
    path = folder / "histories.parquet"
    writer, written, metadata = HistoriesWriter(path, schema), 0, None
    try:
        for table in _sort_by_last_event(read_batches(unordered), order, folder):
            writer.write(table.drop_columns(_LAST))
            written += table.num_rows
            report("write", written / kept_users)
        metadata = HistoriesMetadata(
            num_items=hashed.different if hashed else num_items or largest + 1,
            num_users=kept_users,
            num_events=kept_events,
            dropped_users=dropped,
            columns=tuple(schema.names[1:]),
            fingerprint=make_fingerprint(),
            no_labels=interactions.no_labels,
            read=tuple(describe_interactions(interactions)),
            any_ids=hashed is not None,
        )
    finally:
        writer.close(metadata)
    texts = hashed.texts if hashed is not None else []
    if not interactions.vocabulary.columns and not texts:
        return [path]
    interactions.vocabulary.write(folder / VOCABULARY, texts)
    return [folder / VOCABULARY, path]


def _partition_by_user(
    batches: Iterable[pa.RecordBatch], rows: int, folder: Path, limit: int, level: int = 0
) -> Iterator[pa.Table]:
    """Partitions events by a hash of the user into buckets of about `limit` events."""
    # twice as many as needed, since hashing is uneven
    parts = int(np.clip(-(-2 * rows // limit), 1, _FAN_OUT))
    seed = derive(level, 0)

    def part(batch: pa.RecordBatch) -> NDArray[Any]:
        users = torch.from_numpy(batch.column("user_id").to_numpy().copy())
        return integers(derive(seed, users), parts).numpy()

    for path, count in partition(batches, part, parts, folder / f"users{level}"):
        # a single user may exceed a bucket and cannot be cut further
        if count > limit and (count < rows or level == 0):
            yield from _partition_by_user(read_batches(path), count, folder, limit, level + 1)
        elif count:
            yield pa.Table.from_batches(read_batches(path))
        path.unlink()


def _sort_by_last_event(
    tables: Iterable[pa.RecordBatch], samples: NDArray[Any], folder: Path, level: int = 0
) -> Iterator[pa.Table]:
    """Sorts users by (last timestamp, user). `samples` [n, 2], sorted and unique, give the cuts."""
    parts = min(-(-len(samples) // _SAMPLES), _FAN_OUT)
    if parts <= 1:
        yield pa.Table.from_batches(tables).sort_by(
            [(_LAST, "ascending"), ("user_id", "ascending")]
        )
        return
    cuts = len(samples) * np.arange(1, parts) // parts
    splitters = samples[cuts]  # [parts - 1, 2]

    def part(batch: pa.RecordBatch) -> NDArray[Any]:
        """Counts splitters at or before each user by sorting both: pairs have no searchsorted."""
        last = np.concatenate([splitters[:, 0], batch.column(_LAST).to_numpy()])
        user = np.concatenate([splitters[:, 1], batch.column("user_id").to_numpy()])
        order = np.lexsort((user, last))  # stable: a splitter comes before the user that it equals
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.cumsum(order < len(splitters))
        return ranks[len(splitters) :]

    edges = [0, *cuts.tolist(), len(samples)]
    for index, (path, count) in enumerate(partition(tables, part, parts, folder / f"last{level}")):
        if count:
            inner = samples[edges[index] : edges[index + 1]]
            yield from _sort_by_last_event(read_batches(path), inner, folder, level + 1)
        path.unlink()


def _group_events(events: pa.Table) -> tuple[pa.Table, int]:
    """Flat events -> (a row per user, in time order, with its last timestamp; users dropped)."""
    users, times = (events.column(name).to_numpy() for name in ("user_id", "timestamp"))
    order = np.lexsort((times, users))  # stable
    users = users[order]
    starts = np.flatnonzero(np.concatenate([[len(users) > 0], users[1:] != users[:-1]]))
    counts = np.diff(np.append(starts, len(users)))
    keep = counts >= 2
    order = order[np.repeat(keep, counts)]
    ends = np.cumsum(counts[keep])
    offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
    sorted_events = events.drop_columns("user_id").take(pa.array(order))
    columns: dict[str, pa.Array] = {"user_id": pa.array(users[starts[keep]])}
    for name, values in zip(sorted_events.column_names, sorted_events.columns, strict=True):
        columns[name] = pa.ListArray.from_arrays(offsets, values.combine_chunks())
    columns[_LAST] = pa.array(times[order[ends - 1]])
    return pa.table(columns), int((~keep).sum())


def _sample_order(table: pa.Table, step: int) -> NDArray[Any]:
    """[n, 2] pairs (last timestamp, user), one every `step` events."""
    last, users = (table.column(name).to_numpy() for name in (_LAST, "user_id"))
    order = np.lexsort((users, last))
    ends = np.cumsum(count_events(table.column("item_id"))[order])
    total = int(ends[-1]) if len(ends) else 0
    picked = order[np.searchsorted(ends, np.arange(0, total, step), "right")]
    return np.stack([last[picked], users[picked]], axis=1)


def _estimate_rows(interactions: Interactions) -> int:
    """Number of events; for text an estimate of 24 bytes per event or more."""
    return sum(
        pq.read_metadata(file.path).num_rows if layout.is_parquet else file.size // 24
        for file, layout in zip(interactions.files, interactions.layouts, strict=True)
    )


def _read_schema(path: Path) -> pa.Schema:
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
        fields = [f for f in reader.schema if f.name not in ("user_id", _LAST)]
        return make_schema({field.name: field.type.value_type for field in fields})
