"""Yambda as it is published: a folder with the events, and the artists and albums of the items.

    multi_event.parquet           uid, timestamp, item_id, is_organic, played_ratio_pct,
                                  track_length_seconds, event_type
    artist_item_mapping.parquet   artist_id, item_id
    album_item_mapping.parquet    album_id, item_id

Timestamps are seconds since a moment that is not published, in steps of 5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data.histories import explain_damage
from freescale.data.values import BadValue, decode_text

EVENTS = "multi_event.parquet"
MAPPINGS = {kind: f"{kind}_item_mapping.parquet" for kind in ("artist", "album")}
ROLES = {"user": "uid", "item": "item_id", "time": "timestamp"}
ORGANIC = "is_organic"
READ = ("event_type", "played_ratio_pct", ORGANIC)
MADE = ("action", "listen_plus", ORGANIC)  # columns that are made of these
KINDS = ("listen", "like", "dislike", "unlike", "undislike")
LISTEN_PLUS, LIKE, SKIP = 1, 2, 4  # actions; the three other kinds of events are 0
LISTENED = 50.0  # percent of a track from which on a listen counts as listen_plus


def is_yambda(folder: Path) -> bool:
    """Whether a folder holds the three files."""
    return all((folder / name).is_file() for name in (EVENTS, *MAPPINGS.values()))


def make_actions(kinds: pa.Array, played: pa.Array) -> pa.Array:
    """Kinds of events [n] and the percent of the track that was played [n] -> actions [n]. A listen
    without a percentage is a skip. BadValue for an unknown kind."""
    kinds = decode_text(kinds)
    known = pc.index_in(kinds, pa.array(KINDS, kinds.type))
    if known.null_count:
        row = pc.index(known.is_null(), pa.scalar(True)).as_py()
        problem = f"holds {kinds[row].as_py()!r}, which is none of {', '.join(KINDS)}"
        raise BadValue(row, problem, "fix or drop such rows")
    place = np.asarray(known)
    share = np.asarray(pc.fill_null(played.cast(pa.float64()), 0.0))
    plus = (place == 0) & (share >= LISTENED)
    return pa.array(np.where(plus, LISTEN_PLUS, np.array([SKIP, LIKE, 0, 0, 0])[place]))


def write_items(folder: Path, target: Path) -> None:
    """Writes a row for each item of the mappings: item_id, artist and album, null if a mapping does
    not have the item. Of an item with several artists or albums the last row of the mapping counts,
    as in MLPerf's reference."""
    owners = {kind: _read_owners(folder / name, kind) for kind, name in MAPPINGS.items()}
    size = max(map(len, owners.values()))
    columns = np.full((len(owners), size), -1)
    for column, of in zip(columns, owners.values(), strict=True):
        column[: len(of)] = of
    items = np.flatnonzero(columns.max(0) >= 0)
    table = {"item_id": pa.array(items)}
    for kind, column in zip(owners, columns[:, items], strict=True):
        table[kind] = pa.array(column, mask=column < 0)
    pq.write_table(pa.table(table), target)


def _read_owners(path: Path, kind: str) -> NDArray[np.int64]:
    """[largest item + 1]: the artist or album of each item; -1: none."""
    with explain_damage(path):
        table = pq.read_table(path, columns=[f"{kind}_id", "item_id"])
    if not table.num_rows or any(column.null_count for column in table.columns):
        raise ValueError(f"{path}: no rows, or an id is missing; fetch the file again")
    owners, items = (np.asarray(column, np.int64) for column in table.columns)
    found = np.full(int(items.max()) + 1, -1)
    found[items] = owners  # of repeated indices the last counts
    return found
