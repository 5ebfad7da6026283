"""Converts the timestamps of several files to one unit, so that events of one user from two files
can be ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

_UNITS = ("s", "ms", "us", "ns")  # the finest last


@dataclass(frozen=True)
class TimestampFormat:
    """What is known about a file's timestamps."""

    path: Path
    column: str
    unit: str | None  # None: integers, counting whatever they count
    # whether a time zone is given, so that the values count from 1970 in UTC; None: not said
    zoned: bool | None = None
    shown: str = "int64"

    @staticmethod
    def from_type(path: Path, column: str, kind: pa.DataType) -> TimestampFormat:
        if not pa.types.is_timestamp(kind):
            return TimestampFormat(path, column, None, shown=str(kind))
        return TimestampFormat(path, column, kind.unit, kind.tz is not None, str(kind))

    def convert(self, values: pa.Array, unit: str | None) -> pa.Array:
        """Converts integers or timestamps to int64 in `unit`."""
        try:
            if unit in (None, self.unit):
                return values.cast(pa.int64())
            if not pa.types.is_timestamp(values.type):
                values = values.cast(pa.int64()).cast(pa.timestamp(self.unit))
            return values.cast(pa.timestamp(unit, values.type.tz)).cast(pa.int64())
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0][:200]
            where = f" in {unit}, the finest unit of the files" if unit != self.unit else ""
            raise ValueError(
                f"{self.path}: column {self.column!r}: {reason}; it must fit int64{where}"
            ) from error


def choose_unit(files: Sequence[TimestampFormat]) -> str | None:
    """Chooses the finest unit of the files, to which coarser ones are converted without loss.

    Returns:
        The unit; None if all files have integers, which are taken as they are.

    Raises:
        ValueError: Integers beside timestamps, or times with a zone beside times without one.
    """
    known = [times for times in files if times.unit is not None]
    if not known:
        return None
    for times in files:
        if times.unit is None:
            raise _make_error(times, "of no known unit", known[0])
    zoned = next((times for times in files if times.zoned), None)
    for times in files:
        if zoned is not None and times.zoned is False:
            raise _make_error(times, "of no time zone", zoned)
    return max((times.unit for times in known if times.unit), key=_UNITS.index)


def _make_error(times: TimestampFormat, what: str, other: TimestampFormat) -> ValueError:
    return ValueError(
        f"{times.path}: column {times.column!r} holds {times.shown}, {what}, beside {other.shown} "
        f"of {other.path}; "
        "cast both to timestamps of one kind"
    )
