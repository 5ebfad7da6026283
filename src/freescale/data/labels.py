"""Checks that the labels of ranking are 0 or 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from freescale.data.histories import HistoriesFile


def find_non_label(values: NDArray[Any]) -> str | None:
    """Returns the first value that is neither 0 nor 1, as text; None if there is none."""
    wrong = ~((values == 0) | (values == 1))  # a value that is no number equals neither
    return str(values[wrong.argmax()]) if wrong.any() else None


def check_labels(file: HistoriesFile, names: Sequence[str]) -> None:
    """Raises ValueError for columns with other values than 0 and 1. The metadata of prepared files
    says what their sources hold; other files are read."""
    for name in names:
        if file.no_labels is None:
            found = _find_non_label_in(file, name)
            where, column, value = str(file.path), repr(name), found or ""
        else:
            where, column, value = file.no_labels.get(name, ("", "", ""))
        if value:
            raise ValueError(
                f"{where}: label column {column} holds {value}, not 0 or 1; make its values 0 and "
                "1, or name another column"
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
