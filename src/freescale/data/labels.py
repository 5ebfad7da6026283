"""Labels of ranking: made by comparisons, and checked to be 0 or 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from freescale.config.columns import Label
from freescale.data.histories import HistoriesFile
from freescale.data.values import decode_text, is_text, parse_numbers, refuse_nulls

_COMPARISONS = {
    "==": pc.equal,
    "!=": pc.not_equal,
    ">=": pc.greater_equal,
    "<=": pc.less_equal,
    ">": pc.greater,
    "<": pc.less,
}
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")


def make_label(label: Label, values: pa.Array) -> pa.Array:
    """Makes a label of the values of its column: int8 of a comparison, or numbers."""
    values = decode_text(values)
    refuse_nulls(values)
    if label.operator is None:
        return parse_numbers(_spell_numbers(values)).cast(pa.float32())
    text = isinstance(label.value, str)
    compared = values.cast(pa.string()) if text else parse_numbers(values)
    return _COMPARISONS[label.operator](compared, label.value).cast(pa.int8())


def _spell_numbers(values: pa.Array) -> pa.Array:
    """Replaces `true` and `false` by 1 and 0."""
    if not is_text(values.type):
        return values
    for words, number in ((_TRUE, "1"), (_FALSE, "0")):
        values = pc.if_else(pc.is_in(values, pa.array(words, values.type)), number, values)
    return values


def find_non_label(values: NDArray[Any]) -> str | None:
    """Returns the first value that is neither 0 nor 1, as text; None if there is none."""
    wrong = ~((values == 0) | (values == 1))  # NaN equals neither
    return str(values[wrong.argmax()]) if wrong.any() else None


def check_labels(file: HistoriesFile, names: Sequence[str]) -> None:
    """Raises ValueError for labels other than 0 and 1. Metadata of prepared files says; others are
    read."""
    for name in names:
        if file.no_labels is None:
            found = _find_non_label_in(file, name)
            where, column, value = str(file.path), repr(name), found or ""
        else:
            where, column, value = file.no_labels.get(name, ("", "", ""))
        if value:
            raise ValueError(
                f"{where}: label column {column} holds {value}, not 0 or 1; make its values 0 and "
                f"1, or compare a column of the file: --labels 'like=rating>=4'"
            )


def _find_non_label_in(file: HistoriesFile, name: str) -> str | None:
    for group in range(file.num_groups):
        # of integers only: those of fractions say nothing of what lies between
        extremes = file.read_extremes(group, name)
        if extremes is not None and extremes[0] >= 0 and extremes[1] <= 1:
            continue
        value = find_non_label(file.read(group, (name,)).values[name])
        if value is not None:
            return value
    return None
