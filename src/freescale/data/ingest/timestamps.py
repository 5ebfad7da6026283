"""Timestamps as integers: whole numbers of any unit, fractions, dates as text; and the timestamps
of several files in one unit, so that events of one user from two files can be ordered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.values import (
    BadValue,
    decode_text,
    find_first_failing,
    is_text,
    parse_text,
    reads_as_number,
    refuse_any,
    refuse_nulls,
)

_UNITS = ("s", "ms", "us", "ns")  # the finest last
_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_FINER = {None: "us", "s": "us", "ms": "us", "us": "ns", "ns": "ns"}
_FIX = "write seconds since 1970, or 2024-05-31 or 2024-05-31T13:45:00"
# Least magnitude of a moment in a unit: 1973 in each; in the next coarser one it is after 5000.
_LEAST = {"s": 1e8, "ms": 1e11, "us": 1e14, "ns": 1e17}
# Gaps between these bounds: even ones (the second, fourth, ...) hold the moments from 1990 to 2100
# in one unit, the others hold none in any unit.
_BOUNDS = np.array([1, *(y * 1000**n for n in range(4) for y in (631_152_000, 4_102_444_800))])
_STRAY = 0.01  # a column with two units is a mixture up to this share of other numbers


class UnitCheck:
    """Rejects a column that mixes units, such as seconds and milliseconds, block by block. Other
    counts may fall into several units' ranges, but mostly fall between."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_BOUNDS) + 1, np.int64)
        self._first: tuple[int, float] | None = None  # gap and value

    def check(self, numbers: pa.Array) -> None:
        """Raises BadValue for the first moment in a unit other than the column's first."""
        if not len(numbers):
            return
        values = numbers.to_numpy(zero_copy_only=False)
        low, high = np.searchsorted(_BOUNDS, (values.min(), values.max()), side="right")
        if low == high:  # most blocks: the first value stands for all
            self._counts[low] += len(values) - 1
            values = values[:1]
        gaps = np.searchsorted(_BOUNDS, values, side="right")
        self._counts += np.bincount(gaps, minlength=len(self._counts))
        moments = np.flatnonzero((gaps > 0) & (gaps % 2 == 0))
        if not len(moments):
            return
        if self._first is None:
            self._first = int(gaps[moments[0]]), values[moments[0]].item()
        gap, value = self._first
        others = moments[gaps[moments] != gap]
        if len(others) and self._counts[1::2].sum() <= _STRAY * self._counts[1:].sum():
            row = int(others[0])
            unit, usual = (_WORDS[_UNITS[int(at) // 2 - 1]] for at in (gaps[row], gap))
            raise BadValue(
                row,
                f"holds {values[row].item()}, {unit} since 1970, and {value}, {usual}",
                "convert the column to one unit",
            )


class FinerTimes(Exception):
    """Timestamps are finer than what was read before."""


@dataclass(frozen=True)
class TimestampFormat:
    """The timestamp format of a file."""

    path: object  # the file, named as by the user
    column: str
    unit: str | None  # None: integers of unknown meaning
    # whether a time zone is given, so that the values count from 1970 in UTC; None: unknown
    zoned: bool | None = None
    shown: str = "int64"
    guessed: bool = False  # the unit is guessed from magnitudes
    kind: str = "integers"  # integers, fractions or dates
    source: str | None = None  # unit of fractions in the file

    @property
    def meaning(self) -> str:
        """Description of the values for the user."""
        unit = _WORDS[self.unit] if self.unit else "of no known unit"
        if self.kind == "dates":
            zone = "with a time zone" if self.zoned else "without a time zone"
            return f"dates {zone}, as {unit} since 1970"
        if self.kind == "fractions":
            return f"fractions of {_WORDS[self.source or 's']}, as {unit}"
        return f"integers, {unit}{' since 1970' if self.unit else ''}"

    def refine(self) -> TimestampFormat:
        """The format of values with a finer part."""
        if self.kind == "dates":
            return replace(self, unit="us" if self.unit == "s" else "ns")
        unit = _FINER[self.unit]
        return replace(self, kind="fractions", source=self.unit or "s", unit=unit)

    def parse(self, values: pa.Array, units: UnitCheck) -> pa.Array:
        """Values of any type as int64 in the file's unit. BadValue for a value that is no time or
        in another unit than earlier ones, FinerTimes for a part below the unit."""
        values = decode_text(values)
        refuse_nulls(values)
        kind = values.type
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return _cast_time(values, pa.timestamp(self.unit, getattr(kind, "tz", None)))
        if self.kind == "dates":
            return self._parse_dates(values)
        numbers = None
        if pa.types.is_integer(kind) and self.kind == "integers":
            numbers = _cast_time(values, pa.int64())
        elif is_text(kind) and self.kind == "integers":
            with suppress(pa.ArrowInvalid):  # 881250949.0 is whole, too
                numbers = values.cast(pa.int64())
        if numbers is None:
            return self._parse_fractions(values, units)
        units.check(numbers)
        return numbers

    def _parse_fractions(self, values: pa.Array, units: UnitCheck) -> pa.Array:
        numbers = (
            parse_text(values, pa.float64(), "a time", _FIX)
            if is_text(values.type)
            else _cast_time(values, pa.float64())
        )
        refuse_any(pc.invert(pc.is_finite(numbers)), values, "holds {!r}, not a time", _FIX)
        units.check(numbers)
        if self.kind == "integers":
            if not pc.all(pc.equal(numbers, pc.floor(numbers))).as_py():
                raise FinerTimes
            return _cast_time(numbers, pa.int64())
        steps = _UNITS.index(self.unit or "us") - _UNITS.index(self.source or "s")
        scaled = pc.round(pc.multiply(numbers, float(1000**steps)))
        return _cast_time(scaled, pa.int64())

    def _parse_dates(self, values: pa.Array) -> pa.Array:
        zone = "UTC" if self.zoned else None
        try:
            return values.cast(pa.timestamp(self.unit, zone)).cast(pa.int64())
        except pa.ArrowInvalid:
            finest = values.cast(pa.string())
            kind = "with a time zone like those before it" if zone else "without a time zone"
            parse_text(finest, pa.timestamp("ns", zone), f"a date {kind}", _FIX)
            if self.unit != "ns":
                raise FinerTimes from None
            raise

    def convert(self, values: pa.Array, unit: str | None) -> pa.Array:
        """int64 in the file's unit -> int64 in `unit`; None: as they are."""
        try:
            if unit in (None, self.unit):
                return values
            return values.cast(pa.timestamp(self.unit)).cast(pa.timestamp(unit)).cast(pa.int64())
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0][:200]
            raise BadValue(
                None, reason, f"it must fit int64 in {unit}, the finest unit of the files"
            ) from error


def detect_timestamps(
    path: object, column: str, values: pa.Array, unit: str | None
) -> TimestampFormat:
    """Detects the format of a file's timestamps by its first values, of any type, without missing
    ones. `unit` is the one that the release documents."""
    values = decode_text(values).drop_null()
    kind = values.type
    if pa.types.is_timestamp(kind):
        shown, zoned = str(kind), kind.tz is not None
        return TimestampFormat(path, column, kind.unit, zoned, shown, kind="dates")
    if pa.types.is_date(kind):
        return TimestampFormat(path, column, "s", False, str(kind), kind="dates")
    if is_text(kind) and len(values) and not reads_as_number(values[0].as_py()):
        zoned = _has_zone(values[0].as_py())
        shown = f"dates {'with a' if zoned else 'of no'} time zone"
        return TimestampFormat(path, column, "s", zoned, shown, kind="dates")
    typed = "int64" if is_text(kind) or pa.types.is_null(kind) else str(kind)
    found = unit or _guess_units(values)
    shown = typed if found is None else f"{typed} ({found})"
    return TimestampFormat(path, column, found, shown=shown, guessed=unit is None)


def guess_unit(value: float) -> str | None:
    """The unit in which a number is a moment after 1973; None for small ones."""
    fitting = [unit for unit in _UNITS if abs(value) >= _LEAST[unit]]
    return fitting[-1] if fitting else None


def are_moments(values: Sequence[int], unit: str) -> bool:
    """Whether all integers are moments from 1990 to 2100 in a unit: they read as nothing else."""
    first = 1 + 2 * _UNITS.index(unit)
    low, high = _BOUNDS[first : first + 2].tolist()
    return bool(low <= min(values) and max(values) < high)


def choose_unit(files: Sequence[TimestampFormat]) -> str | None:
    """Chooses the finest unit of the files, to which coarser ones are converted without loss. None
    keeps values as they are: all files count alike, or in an unknown unit. ValueError for integers
    of unknown unit mixed with timestamps, and for times with and without a zone."""
    known = [times for times in files if times.unit is not None]
    if len({times.unit for times in known}) <= 1 and all(times.guessed for times in known):
        return None
    for times in files:
        if times.unit is None:
            raise _make_error(times, "of no known unit", known[0])
    zoned = next((times for times in files if times.zoned), None)
    for times in files:
        if zoned is not None and times.zoned is False:
            raise _make_error(times, "of no time zone", zoned)
    return max((times.unit for times in known if times.unit), key=_UNITS.index)


def _guess_units(values: pa.Array) -> str | None:
    """The unit of the median, so that a stray zero does not matter."""
    if not len(values):
        return None
    try:
        numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        return None
    return guess_unit(float(np.median(numbers)))


def _has_zone(text: str) -> bool:
    try:
        pa.array([text]).cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid:
        return False
    return True


def _cast_time(values: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        cast = values.cast(kind)
        return cast.cast(pa.int64()) if pa.types.is_timestamp(kind) else cast
    except pa.ArrowException as error:
        if (row := find_first_failing(values, kind)) is not None:
            value = values[row].as_py()
            raise BadValue(row, f"holds {value!r}, beyond times of 64 bits", _FIX) from error
        reason = str(error).splitlines()[0][:120]
        raise BadValue(None, f"holds {values.type}, not times ({reason})", _FIX) from error


def _make_error(times: TimestampFormat, what: str, other: TimestampFormat) -> ValueError:
    return ValueError(
        f"{times.path}: column {times.column!r} holds {times.shown}, {what}, next to {other.shown} "
        f"of {other.path}; cast both to timestamps of one kind"
    )
