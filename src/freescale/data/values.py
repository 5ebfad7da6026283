"""Errors for bad values of a column: which row, which value, and the fix."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


class BadValue(ValueError):
    """An unusable value; `row` None: the whole column. The reader adds file and line."""

    def __init__(self, row: int | None, problem: str, fix: str):
        super().__init__(f"{problem}; {fix}")
        self.row, self.problem, self.fix = row, problem, fix


def refuse_nulls(values: pa.Array) -> None:
    """Raises BadValue for the first missing value."""
    if values.null_count:
        row = pc.index(values.is_null(), pa.scalar(True)).as_py()
        count = values.null_count
        raise BadValue(
            row,
            f"is missing ({count} null value{'s' if count > 1 else ''} here)",
            "fill or drop such rows (--missing drop leaves out rows without user, item or time)",
        )


def refuse_any(wrong: pa.Array, values: pa.Array, problem: str, fix: str) -> None:
    """Raises BadValue for the first of the values that is `wrong`; `problem` has `{}` for it."""
    if (row := pc.index(wrong, pa.scalar(True)).as_py()) >= 0:
        raise BadValue(row, problem.format(values[row].as_py()), fix)


def parse_text(values: pa.Array, kind: pa.DataType, wanted: str, fix: str) -> pa.Array:
    """Parses strings as numbers or times. BadValue names the first invalid one."""
    try:
        return values.cast(kind)
    except pa.ArrowInvalid as error:
        row = find_first_failing(values, kind) or 0
        text = values[row].as_py()[:80]
        raise BadValue(row, f"holds {text!r}, not {wanted}", fix) from error


def find_first_failing(values: pa.Array, kind: pa.DataType) -> int | None:
    """Bisects for the first value that cannot be cast; None if the type itself does not allow
    it."""
    try:
        values.slice(0, 0).cast(kind)
    except pa.ArrowException:
        return None
    low, high = 0, len(values)  # it is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values.slice(low, middle - low).cast(kind)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low


def parse_numbers(values: pa.Array) -> pa.Array:
    """Numbers of any type or as text, as float64 without nulls and NaN."""
    refuse_nulls(values)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    numbers = (
        parse_text(values, pa.float64(), "a number", "fix or drop such rows")
        if is_text(values.type)
        else cast_values(values, pa.float64(), "numbers")
    )
    wrong = pc.invert(pc.is_finite(numbers))
    refuse_any(wrong, values, "holds {!r}, not a number", "fix or drop such rows")
    return numbers


def cast_values(values: pa.Array, kind: pa.DataType, wanted: str) -> pa.Array:
    """Casts values other than text. Raises BadValue if the type does not allow it."""
    try:
        return values.cast(kind)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0][:120]
        raise BadValue(
            None, f"holds {values.type}, not {wanted} ({reason})", "cast it, or name another column"
        ) from error


def is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def decode_text(values: pa.Array) -> pa.Array:
    """Decodes dictionaries and bytes; other values are unchanged."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        values = cast_values(values, pa.string(), "UTF-8 text")
    return values.cast(pa.string()) if pa.types.is_string_view(values.type) else values
