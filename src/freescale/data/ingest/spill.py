"""Arrow files on the disk for data that does not fit in memory: written once, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def partition(
    batches: Iterable[pa.RecordBatch],
    part: Callable[[pa.RecordBatch], NDArray[Any]],
    parts: int,
    folder: Path,
) -> list[tuple[Path, int]]:
    """Writes each row to the file of its part, in order; returns path and number of rows of each
    part."""
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
    """Writes tables of one schema to a file; no file without tables."""
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


def read_table(path: Path) -> pa.Table:
    """Reads a whole file."""
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
        return reader.read_all()
