"""Ids: integers stay as they are; anything else is coded, densely and in order of first appearance.

A column is one or the other throughout. The whole column decides, so
reading begins with integers and starts again with codes (`ReadDifferently`) if that was wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freescale.data.histories import VOCABULARY as VOCABULARY  # which lies next to them
from freescale.data.values import BadValue, cast_values, is_text, refuse_any, refuse_nulls
from freescale.folders import find_cache_folder
from freescale.random import hash_name
from freescale.stores.path import StorePath, download

_NOTHING = ("nan", "null", "none", "na", "n/a", "<na>", "\\n")  # in lower case
_SMALL = 1 << 20  # a catalogue up to this size is never too large
_ROWS_PER_EVENT = 10  # of the item table; sparser ids are random numbers


@dataclass(frozen=True)
class Reading:
    """Findings about columns that their first values do not show."""

    coded: Mapping[str, str] = field(default_factory=dict)  # id column -> why it is coded
    finer: Mapping[str, int] = field(default_factory=dict)  # file -> refinements of its times

    def code(self, name: str, reason: str) -> Reading:
        return replace(self, coded={**self.coded, name: reason})

    def refine(self, file: str) -> Reading:
        return replace(self, finer={**self.finer, file: self.finer.get(file, 0) + 1})


class ReadDifferently(ValueError):
    """The file has to be read again, in another way."""

    def __init__(self, message: str, reading: Reading):
        super().__init__(message)
        self.reading = reading


class NotIntegers(Exception):
    """Ids that must be coded, and why."""


def parse_integers(values: pa.Array, signed: bool = False) -> pa.Array:
    """Ids as int64. NotIntegers for strings, ids beyond int64, leading zeros and, unless `signed`,
    negative ids; BadValue for missing ids and fractions."""
    refuse_nulls(values)
    if is_text(values.type):
        if not signed:  # dynamic tables treat ids one by one, whatever block they are in
            values = _strip_zero_fractions(values)
        try:
            numbers = values.cast(pa.int64())
        except pa.ArrowInvalid:
            _refuse_missing_markers(values)
            raise NotIntegers("strings") from None
        # 007 is not 7, and 0x1f would be read as 31
        zeros = pc.and_(pc.starts_with(values, "0"), pc.greater(pc.binary_length(values), 1))
        if pc.any(pc.or_(zeros, pc.starts_with(values, "-0"))).as_py():
            raise NotIntegers("strings, with leading zeros")
    elif pa.types.is_integer(values.type):
        try:
            numbers = values.cast(pa.int64())
        except pa.ArrowInvalid:
            raise NotIntegers("integers beyond 64 bits with a sign") from None
    elif pa.types.is_floating(values.type):
        whole = pc.floor(values)
        fits = pc.and_(pc.equal(whole, values), pc.less(pc.abs(whole), float(1 << 63)))
        problem = f"holds {{!r}} ({values.type}), not an id"
        refuse_any(pc.invert(fits), values, problem, "cast it to int64 or to strings")
        numbers = cast_values(whole, pa.int64(), "ids")
    else:
        raise BadValue(
            None,
            f"holds {values.type}, not ids",
            "cast it to int64 or to strings, or name another column",
        )
    if not signed and len(numbers) and pc.min(numbers).as_py() < 0:
        raise NotIntegers("integers, some of them negative")
    return numbers


def _strip_zero_fractions(texts: pa.Array) -> pa.Array:
    """Turns 12.0, as written for integer columns with gaps, into 12. Other texts are unchanged."""
    whole = pc.match_substring_regex(texts, r"^-?\d+\.0+$")
    if not pc.any(whole).as_py():
        return texts
    return pc.if_else(whole, pc.replace_substring_regex(texts, r"\.0+$", ""), texts)


def _refuse_missing_markers(texts: pa.Array) -> None:
    """BadValue for NaN and the like among integers: all ids would become strings."""
    words = pc.is_in(pc.utf8_lower(texts), pa.array(_NOTHING, texts.type))
    if not pc.any(words).as_py():
        return
    try:
        texts.filter(pc.invert(words)).cast(pa.int64())
    except pa.ArrowInvalid:
        return  # strings throughout: it may be a name
    fix = "drop such rows, or leave the value empty and add --missing drop"
    refuse_any(words, texts, "holds {!r} among integers", fix)


def is_huge(largest: int, events: int) -> bool:
    """Whether a table with a row for every id would be almost unused."""
    return largest >= _SMALL and largest >= _ROWS_PER_EVENT * events


Known = Mapping[str, Sequence[str]]  # texts of coded columns, in the order of their numbers


class Vocabulary:
    """Codes of the ids of each coded column. Those of `known` texts stay as they are."""

    def __init__(self, known: Known | None = None) -> None:
        self.columns: dict[str, dict[str, int]] = {
            name: {text: number for number, text in enumerate(texts)}
            for name, texts in (known or {}).items()
        }
        # known ids of each column, as long as none has come
        self.unmet = {name: len(codes) for name, codes in self.columns.items()}

    def encode(self, name: str, values: pa.Array) -> pa.Array:
        """Replaces ids by codes. The loop is over the distinct ids of the block, not its events."""
        refuse_nulls(values)
        codes = self.columns.setdefault(name, {})
        text = values if is_text(values.type) else cast_values(values, pa.string(), "ids")
        encoded = text.dictionary_encode()  # its dictionary is in order of first appearance, too
        known = pa.array(
            [codes.setdefault(text, len(codes)) for text in encoded.dictionary.to_pylist()],
            pa.int64(),
        )
        if name in self.unmet and len(known) and pc.min(known).as_py() < self.unmet[name]:
            del self.unmet[name]
        return known.take(encoded.indices)

    def write(self, path: Path, hashed: Iterable[tuple[pa.Array, pa.Array]] = ()) -> None:
        """Writes the columns `column`, `id` and `text`. `hashed`: ids and texts of hashed items."""
        schema = pa.schema([("column", pa.string()), ("id", pa.int64()), ("text", pa.string())])
        coded = (
            (name, pa.array(np.arange(len(codes))), pa.array(list(codes), pa.string()))
            for name, codes in self.columns.items()
        )
        with pq.ParquetWriter(path, schema) as writer:
            for name, ids, texts in chain(coded, (("item_id", *each) for each in hashed)):
                columns = [pa.repeat(name, len(ids)), ids, texts]
                writer.write_table(pa.table(columns, schema=schema))


def read_known(vocabulary: Path) -> Known:
    """The texts of a vocabulary; nothing if there is no such file."""
    found: dict[str, list[str]] = {}
    if vocabulary.is_file():
        table = pq.read_table(vocabulary).sort_by("id")
        names, texts = (table.column(name).to_pylist() for name in ("column", "text"))
        for name, text in zip(names, texts, strict=True):
            found.setdefault(name, []).append(text)
    return found


def find_vocabulary(histories: Path) -> Path | None:
    """The vocabulary of a prepared histories file; None if ids are unchanged."""
    path = (histories if histories.is_dir() else histories.parent) / VOCABULARY
    if isinstance(path, StorePath) and path.is_file():
        name = f"{hash_name(f'{path} {path.ask()}'):016x}"
        local = find_cache_folder() / "vocabularies" / name / VOCABULARY
        return local if local.is_file() else download(path, local)
    return path if path.is_file() else None


def check_vocabulary(found: Path | None, expected: Path, columns: Sequence[str]) -> None:
    """ValueError if a vocabulary differs from the `expected` one in the `columns` of a model."""
    known = _read_vocabulary(expected, columns)
    if known.num_rows and (found is None or not _read_vocabulary(found, columns).equals(known)):
        raise ValueError(
            f"ids of this data are numbered otherwise than those that the model was trained on "
            f"({expected}); evaluate on the same data, or on integer ids"
        )


def restore_ids(vocabulary: Path | None, column: str, ids: Sequence[int]) -> list[str | int]:
    """Original ids of a prepared file; without text they are integers, or hashes."""
    if vocabulary is None:
        return list(ids)
    table = _read_vocabulary(vocabulary, [column])
    texts = dict(zip(table.column("id").to_pylist(), table.column("text").to_pylist()))
    return [texts.get(id, id) for id in ids]


def _read_vocabulary(path: Path, columns: Sequence[str]) -> pa.Table:
    table = pq.read_table(path)
    return table.filter(pc.is_in(table.column("column"), pa.array(columns, pa.string())))
