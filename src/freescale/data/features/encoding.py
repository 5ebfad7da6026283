"""Encodes features and writes them, a part of the rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data.feature_values import PART, read_vectors
from freescale.data.features.attributes import AttributeFile, naming
from freescale.data.features.fitting import Columns, Fitted, encode_all

Codes = NDArray[np.int32]
Rows = NDArray[np.int64]


def encode_parts(fitted: Fitted, columns: Columns) -> Codes:
    """All values of a feature -> [n, places] rows of its table."""
    names = fitted.feature.columns
    count = len(columns[names[0]])
    found = np.empty((count, fitted.places), np.int32)
    for first in range(0, count if fitted.places else 0, PART):
        part = {name: columns[name].slice(first, PART) for name in names}
        found[first : first + PART] = fitted.encode(part)
    return found


def write_codes(path: Path, fitted: Sequence[Fitted], codes: Sequence[Codes], rows: Rows) -> None:
    """Writes [len(rows), places] codes of all features.

    Args:
        fitted: the features.
        codes: of each feature, [n, its places].
        rows: which of the n; -1: all values are missing.
    """
    names = [name for each in fitted for name in each.feature.columns]
    missing = encode_all(fitted, {name: pa.nulls(1) for name in names})
    parts = [each for each in codes if each.shape[1]]

    def make(some: Rows) -> Codes:
        if not parts:  # vectors only
            return missing.repeat(len(some), axis=0)
        block = np.concatenate([each[some] for each in parts], axis=1)
        block[some < 0] = missing
        return block

    _write_rows(path, missing, rows, make)


def write_vectors(
    path: Path, source: AttributeFile, fitted: Fitted, columns: Columns, rows: Rows
) -> None:
    """Writes [len(rows), width] vectors in 16 bits; `rows` as of `write_codes`."""
    with naming(source.file, fitted.feature):
        vectors = read_vectors(columns[fitted.feature.columns[0]])
    if vectors.shape[1] not in (0, fitted.width):
        raise ValueError(
            f"{source.file}: the vectors of column {fitted.feature.name!r} have "
            f"{vectors.shape[1]} numbers, the model was trained with {fitted.width}"
        )
    missing = np.zeros((1, fitted.width), np.float16)

    def make(some: Rows) -> NDArray[np.float16]:
        block = missing.repeat(len(some), axis=0)
        if vectors.shape[1]:  # none if all are missing
            block[some >= 0] = vectors[some[some >= 0]]
        return block

    _write_rows(path, missing, rows, make)


def _write_rows(
    path: Path, like: NDArray[Any], rows: Rows, make: Callable[[Rows], NDArray[Any]]
) -> None:
    """Writes what np.save would, without holding it in memory."""
    about = {"descr": like.dtype.str, "fortran_order": False, "shape": (len(rows), like.shape[1])}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        for first in range(0, len(rows), PART):
            file.write(make(rows[first : first + PART]).tobytes())
