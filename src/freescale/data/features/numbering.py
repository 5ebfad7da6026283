"""The numbers of items and users in the histories, for the ids of a file of attributes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data.features.attributes import AttributeFile
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.hashed_ids import HashedIds
from freescale.data.ingest.ids import NotIntegers, find_vocabulary, is_huge, parse_integers
from freescale.data.values import BadValue, cast_values, is_text

Ids = NDArray[np.int64]


def number_items(
    source: AttributeFile, values: pa.Array, file: HistoriesFile
) -> tuple[Ids, int, pa.Table | None]:
    """Numbers the items of a file of attributes. Those that the histories do not have follow the
    others.

    Returns:
        [n] ids; how many items there are in all; the vocabulary of all of them, if ids are coded.
    """
    if file.any_ids:
        return np.array(HashedIds(keep=False).encode(values), np.int64), file.num_items, None
    known = _read_texts(file.path, "item_id")
    if known is None:
        ids = _parse_ids(source, values)
        largest = int(ids.max(initial=-1))
        if is_huge(largest, file.num_items + len(ids)):
            raise ValueError(
                f"{source.file}: item id {largest} of column {source.key!r} needs a table of as "
                f"many rows; use ids below {10 * len(ids):,}, or text"
            )
        return ids, max(file.num_items, largest + 1), None
    texts = _spell(values)
    new = pc.unique(texts.filter(pc.is_null(pc.index_in(texts, known))))
    every = pa.concat_arrays([known, new])
    numbers = pa.array(np.arange(len(known), len(every)))
    vocabulary = pq.read_table(find_vocabulary(file.path))
    further = pa.table([pa.repeat("item_id", len(new)), numbers, new], schema=vocabulary.schema)
    ids = np.array(pc.index_in(texts, every), np.int64)
    return ids, max(file.num_items, len(every)), pa.concat_tables([vocabulary, further])


def number_users(source: AttributeFile, values: pa.Array, file: HistoriesFile) -> Ids:
    """[n] the ids of users as in the histories, -1 for those that these do not have."""
    known = _read_texts(file.path, "user_id")
    if known is None:
        return _parse_ids(source, values)
    return np.array(pc.fill_null(pc.index_in(_spell(values), known), -1), np.int64)


def _read_texts(histories: Path, column: str) -> pa.Array | None:
    """The texts of coded ids, in the order of their numbers; None if ids are not coded."""
    path = find_vocabulary(histories)
    known = None if path is None else pq.read_table(path)
    mine = None if known is None else known.filter(pc.equal(known.column("column"), column))
    if mine is None or not mine.num_rows:
        return None
    return mine.sort_by("id").column("text").combine_chunks()


def _spell(values: pa.Array) -> pa.Array:
    return values if is_text(values.type) else cast_values(values, pa.string(), "ids")


def _parse_ids(source: AttributeFile, values: pa.Array) -> Ids:
    """Ids of data whose ids are integers."""
    try:
        return np.array(parse_integers(values), np.int64)
    except (NotIntegers, BadValue) as error:
        raise ValueError(
            f"{source.file}: column {source.key!r} holds {error}, and the {source.role} ids of the "
            "interactions are integers; use the same ids in both"
        ) from None


def refuse_repeated(source: AttributeFile, values: Sequence[pa.Scalar], ids: Ids) -> None:
    """Raises ValueError if an id [n], other than -1, occurs twice; `values` as the file has
    them."""
    rows = np.flatnonzero(ids != -1)
    ordered = rows[np.argsort(ids[rows], kind="stable")]
    again = np.flatnonzero(np.diff(ids[ordered]) == 0)
    if len(again):
        first, second = sorted((int(ordered[again[0]]), int(ordered[again[0] + 1])))
        raise ValueError(
            f"{source.file}, rows {first + 1} and {second + 1}: column {source.key!r} holds "
            f"{values[second].as_py()!r} twice ({len(again):,} such rows); keep one row per "
            f"{source.role}"
        )
