"""The items of a model: their original ids, and the rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data.ingest.hashed_ids import hash_ids

UNKNOWN = -1
ITEMS = "items.parquet"


@dataclass(frozen=True)
class Catalogue:
    """Items by their row.

    Attributes:
        ids: [items] original ids, text or int64. Null: no event and no file of attributes has this
            item, so it is never recommended.
        events: [items] how many events of each are in the training part.
        keys: [items] ascending: the 64-bit ids of a dynamic table. None: the rows are the ids that
            the model was trained with.
    """

    ids: pa.Array
    events: NDArray[np.int64]
    keys: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_text(self) -> bool:
        return bool(pa.types.is_string(self.ids.type))

    @cached_property
    def listed(self) -> NDArray[np.int64]:
        """Rows of the items that can be recommended, ascending."""
        return np.flatnonzero(np.asarray(pc.is_valid(self.ids)))

    @cached_property
    def popular(self) -> NDArray[np.int64]:
        """Rows of these items, the one with the most training events first."""
        order = np.argsort(-self.events[self.listed], kind="stable")
        return np.asarray(self.listed[order])

    @cached_property
    def _rows(self) -> dict[Any, int]:
        return {id: row for row, id in enumerate(self.ids.to_pylist()) if id is not None}

    def find(self, given: Sequence[Any]) -> NDArray[np.int64]:
        """Rows of original ids; UNKNOWN for an item that the model was not trained with. A dynamic
        table has a row behind the others for all such items."""
        if self.keys is None:
            plain = str if self.is_text else to_integer
            known, ready = self._rows, str if self.is_text else int
            values = given if {*map(type, given)} <= {ready} else map(plain, given)
            return np.array([known.get(each, UNKNOWN) for each in values], np.int64)
        keys = self.hash(given)
        assert keys is not None
        return self.find_keys(keys)

    def hash(self, given: Sequence[Any]) -> NDArray[np.int64] | None:
        """The 64-bit ids of original ids, if the table is dynamic."""
        return None if self.keys is None else hash_ids([str(each) for each in given]).numpy()

    def find_keys(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of 64-bit ids of a dynamic table."""
        assert self.keys is not None
        place = np.searchsorted(self.keys, wanted)
        found = np.append(self.keys, 0)[place] == wanted
        return np.where(found & (place < len(self)), place, len(self))

    def restore(self, rows: NDArray[np.int64]) -> list[Any]:
        """Original ids of rows."""
        found: list[Any] = self.ids.take(pa.array(rows)).to_pylist()
        return found

    def write(self, folder: Path) -> Path:
        columns = {"id": self.ids, "events": pa.array(self.events)}
        if self.keys is not None:
            columns["key"] = pa.array(self.keys)
        pq.write_table(pa.table(columns), folder / ITEMS)
        return folder / ITEMS

    @staticmethod
    def read(folder: Path) -> Catalogue:
        table = pq.read_table(folder / ITEMS).combine_chunks()
        keys = table.column("key").to_numpy() if "key" in table.column_names else None
        ids = table.column("id").combine_chunks()
        return Catalogue(ids, table.column("events").to_numpy(), keys)


def to_integer(id: Any) -> Any:
    """An integer id as it is, as text or as a whole number with a fraction of 0."""
    try:
        number = int(id)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isinstance(id, str) or number == id else None


def number_items(
    texts: tuple[NDArray[np.int64], pa.Array] | None,
    there: NDArray[np.bool_],
    keys: NDArray[np.int64] | None,
) -> pa.Array:
    """Original ids [items] of a catalogue.

    Args:
        texts: numbers and texts of coded or hashed items, from the vocabulary.
        there: [items] whether the data has the item.
        keys: of a dynamic table.
    """
    numbers = np.arange(len(there)) if keys is None else keys
    if texts is None or not len(texts[0]):
        return pa.array(numbers, mask=~there)
    order = np.argsort(texts[0], kind="stable")
    place = np.searchsorted(texts[0][order], numbers).clip(max=len(order) - 1)
    coded = texts[0][order][place] == numbers
    named = texts[1].cast(pa.string()).take(pa.array(order[place], mask=~coded))
    found = pc.coalesce(named, pa.array(numbers).cast(pa.string()))
    return pc.if_else(pa.array(there), found, pa.scalar(None, pa.string()))


def read_texts(vocabulary: Path | None, column: str) -> tuple[NDArray[np.int64], pa.Array] | None:
    """Numbers [n] and texts [n] of a column; None if it is integers."""
    return None if vocabulary is None else select_texts(pq.read_table(vocabulary), column)


def select_texts(table: pa.Table, column: str) -> tuple[NDArray[np.int64], pa.Array] | None:
    """As `read_texts`, of what a vocabulary holds."""
    table = table.filter(pc.equal(table.column("column"), column)).combine_chunks()
    if not table.num_rows:
        return None
    return table.column("id").to_numpy(), table.column("text").combine_chunks()
