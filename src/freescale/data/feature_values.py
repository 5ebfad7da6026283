"""A feature's values as keys or numbers, whatever the format of the file.

A category is text: 3, 3.0 and "3" are one category. Empty text and NaN are missing, as null is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from freescale.data.histories import is_list
from freescale.data.values import BadValue, cast_values, is_text, parse_text, refuse_any
from freescale.random import derive_array, hash_name

PART = 1 << 18  # rows at a time: intermediate copies are of one part only
MISSING = hash_name("missing value of a cross")


def split_rows(values: pa.Array) -> Iterator[pa.Array]:
    """Slices of bounded size; one if there are no rows."""
    return (values.slice(first, PART) for first in range(0, max(len(values), 1), PART))


def read_keys(values: pa.Array) -> pa.Array:
    """[n] text, null if missing. BadValue if the type has no categories."""
    return pa.concat_arrays([_read_keys(part) for part in split_rows(values)])


def _read_keys(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_null(kind):
        return values.cast(pa.string())
    if pa.types.is_floating(kind):
        whole = pc.equal(pc.floor(values), values)
        texts = cast_values(values, pa.string(), "categories")
        texts = pc.if_else(whole, pc.replace_substring_regex(texts, r"\.0$", ""), texts)
        return pc.if_else(pc.is_nan(values), pa.scalar(None, pa.string()), texts)
    if is_list(kind) or pa.types.is_nested(kind):
        raise BadValue(None, f"holds {kind}, not categories", "use kind multi for lists of text")
    texts = cast_values(values, pa.string(), "categories")
    if is_text(kind):
        texts = pc.utf8_trim_whitespace(texts)
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    return texts


def read_key_lists(values: pa.Array, separator: str) -> tuple[pa.Array, NDArray[np.int64]]:
    """Lists, or text with a separator -> (keys [m] of all values without missing ones, how many of
    them each of the n lists has). BadValue for other types."""
    keys, sizes = zip(*(_read_key_lists(part, separator) for part in split_rows(values)))
    return pa.concat_arrays(keys), np.concatenate(sizes)


def _read_key_lists(values: pa.Array, separator: str) -> tuple[pa.Array, NDArray[np.int64]]:
    if not is_list(values.type):
        if not (is_text(values.type) or pa.types.is_null(values.type)):
            raise BadValue(
                None, f"holds {values.type}, neither lists nor text", "use kind categorical"
            )
        values = pc.split_pattern(values.cast(pa.string()), separator)
    sizes = np.asarray(pc.fill_null(pc.list_value_length(values), 0), np.int64)
    keys = read_keys(pc.list_flatten(values))
    if not keys.null_count:
        return keys, sizes
    there = np.asarray(pc.is_valid(keys))
    owner = np.repeat(np.arange(len(sizes)), sizes)[there]
    return keys.filter(pa.array(there)), np.bincount(owner, minlength=len(sizes))


def read_numbers(values: pa.Array, finite: bool = True) -> NDArray[np.float64]:
    """[n] float64, NaN if missing. BadValue for text that is no number, and if they must be
    `finite` for infinity."""
    if pa.types.is_null(values.type):
        return np.full(len(values), np.nan)
    if is_text(values.type):
        texts = pc.utf8_trim_whitespace(values)
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        fix = "fix or drop such rows, or use kind categorical"
        numbers = parse_text(texts, pa.float64(), "a number", fix)
    else:
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        if pa.types.is_temporal(values.type):
            values = values.cast(pa.int64() if values.type.bit_width == 64 else pa.int32())
        numbers = cast_values(values, pa.float64(), "numbers")
    if finite:
        infinite = pc.fill_null(pc.is_inf(numbers), False)
        problem = "holds {!r}, and numbers are finite"
        refuse_any(infinite, values, problem, "fix or empty that value")
    return np.array(pc.fill_null(numbers, np.nan), np.float64)


def read_vectors(values: pa.Array) -> NDArray[np.float32]:
    """Lists of numbers -> [n, width] float32 of length 1; zeros if missing. BadValue for vectors of
    different widths and numbers that are not finite."""
    if not (is_list(values.type) or pa.types.is_fixed_size_list(values.type)):
        raise BadValue(None, f"holds {values.type}, not lists of numbers", "use another kind")
    sizes = np.asarray(pc.fill_null(pc.list_value_length(values), 0), np.int64)
    there = np.flatnonzero(sizes > 0)
    width = int(sizes[there[0]]) if len(there) else 0
    if len(other := there[sizes[there] != width]):
        row = int(other[0])
        problem = f"has a vector of {sizes[row]} numbers, those before have {width}"
        raise BadValue(row, problem, "give vectors of one width")
    numbers = np.array(
        pc.fill_null(cast_values(pc.list_flatten(values), pa.float32(), "numbers"), np.nan)
    ).reshape(len(there), width)
    if (wrong := ~np.isfinite(numbers).all(1)).any():
        row = int(there[np.flatnonzero(wrong)[0]])
        raise BadValue(row, "has a vector with a number that is not finite", "fix that vector")
    found = np.zeros((len(values), width), np.float32)
    lengths = np.linalg.norm(numbers, axis=1, keepdims=True)
    found[there] = numbers / np.maximum(lengths, np.finfo(np.float32).tiny)
    return found


def hash_texts(keys: pa.Array) -> NDArray[np.int64]:
    """Text [n] -> `random.hash_name` of each; what is missing has a hash of its own."""
    encoded = keys.dictionary_encode()
    hashes = np.array([*map(hash_name, encoded.dictionary.to_pylist()), MISSING], np.int64)
    return np.asarray(hashes[np.asarray(pc.fill_null(encoded.indices, len(hashes) - 1))])


def hash_keys(columns: Sequence[pa.Array]) -> NDArray[np.int64]:
    """Keys [n] of several columns -> [n] hashes of their combinations, the same in every version:
    joined by `random.derive` in the order of the columns."""
    found = np.zeros(len(columns[0]), np.int64)
    for keys in columns:
        found = derive_array(found, hash_texts(keys))
    return found
