"""Which kind of feature a column is, by its values, and why a column is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freescale.config.features import Feature
from freescale.data.feature_values import read_key_lists, read_keys, read_numbers
from freescale.data.histories import is_list
from freescale.data.values import BadValue, is_text, reads_as_number

_FEW = 50  # different integers up to which they are categories and no amounts
_MANY = 100_000  # categories that a column may have without being named
_SHARE = 0.5  # share of the rows: more different texts are names or descriptions
_SOME = 10  # different texts that are categories in any case
_SEPARATORS = ("|", ";", ", ", ",")
_SPLIT = 0.2  # share of the texts with a separator that makes a column multi


@dataclass(frozen=True)
class Column:
    """A column of a source, and what is done with it."""

    feature: Feature  # without a kind if it is left out
    different: int  # values
    missing: float  # share of the rows
    reason: str = ""  # why it is left out

    @property
    def used(self) -> bool:
        return self.feature.kind is not None

    def without(self, kinds: Sequence[str], reason: str) -> Column:
        """Left out if it is of one of these kinds."""
        if self.feature.kind not in kinds:
            return self
        return replace(self, feature=replace(self.feature, kind=None), reason=reason)

    def describe(self) -> str:
        """What the values are and what is done with them, in one line."""
        found = f"{self.different:,} values, {self.missing:.1%} missing"
        return f"{found}: {self.feature.kind or f'left out, {self.reason}'}"


def infer_column(name: str, source: str, values: pa.Array, declared: str | None = None) -> Column:
    """Infers the kind of a column. `declared`: `id`, or the type in a header of RecBole, which
    decides. BadValue for a value that is not of the declared type."""
    feature = Feature(name, source, None, (name,))
    kind = values.type
    if pa.types.is_null(kind) or not len(values) or values.null_count == len(values):
        return Column(feature, 0, 1.0, "it has no values")
    if declared == "id":
        missing = values.null_count / len(values)
        return Column(
            replace(feature, kind="id", rows=0), pc.count_distinct(values).as_py(), missing
        )
    if declared == "float_seq":
        reason = "its lists of numbers are text; give them as lists, in Parquet or JSON lines"
        return Column(
            feature, len(values) - values.null_count, values.null_count / len(values), reason
        )
    if declared == "token_seq":
        return _infer_list(replace(feature, separator=" "), values, words=True)
    if _holds_vectors(kind):
        missing = float(
            np.asarray(pc.fill_null(pc.equal(pc.list_value_length(values), 0), True)).mean()
        )
        return Column(replace(feature, kind="vector"), len(values), missing)
    if is_list(kind):
        return _infer_list(feature, values)
    if pa.types.is_nested(kind):
        return Column(feature, 0, 0.0, f"it holds {kind}")
    numbers = None if declared == "token" else _read_numbers(values, declared == "float")
    if numbers is not None and not pa.types.is_boolean(kind):
        there = numbers[~np.isnan(numbers)]
        different = len(np.unique(there))
        missing = 1 - len(there) / len(numbers)
        whole = bool((np.isfinite(there) & (there == np.floor(there))).all())
        if different <= 1:
            return Column(feature, different, missing, "its values are all the same")
        few = whole and different <= _FEW and declared is None
        return Column(
            replace(feature, kind="categorical" if few else "numeric"), different, missing
        )
    keys = read_keys(values)
    separator = None if declared else _find_separator(keys)
    if separator is not None:
        return _infer_list(replace(feature, separator=separator), values)
    return _judge_categories(feature, "categorical", keys, len(keys), keys.null_count / len(keys))


def _holds_vectors(kind: pa.DataType) -> bool:
    """Lists of fractions are vectors, those of integers and text are categories."""
    if not (is_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    return bool(pa.types.is_floating(kind.value_type))


def _infer_list(feature: Feature, values: pa.Array, words: bool = False) -> Column:
    """`words`: many of them may occur once."""
    try:
        keys, sizes = read_key_lists(values, feature.separator)
    except BadValue as error:
        return Column(feature, 0, 0.0, f"it {error.problem}")
    missing = float((sizes == 0).mean())
    rows = len(keys) / _SHARE if words else len(sizes)
    return _judge_categories(feature, "multi", keys, rows, missing)


def _judge_categories(
    feature: Feature, kind: str, keys: pa.Array, rows: float, missing: float
) -> Column:
    different = pc.count_distinct(keys).as_py()
    reason = ""
    if different <= 1:
        reason = "its values are all the same"
    elif different > _MANY:
        reason = f"{different:,} values are many; name it to use it: {feature.name}={kind}"
    elif different > max(_SOME, _SHARE * rows):
        reason = f"most values occur once; name it to use it: {feature.name}={kind}"
    return Column(replace(feature, kind=None if reason else kind), different, missing, reason)


def _read_numbers(values: pa.Array, sure: bool) -> np.ndarray | None:
    """Numbers, also as text; None if some are none and it is not `sure`. Codes as 007 are none."""
    if sure:
        return read_numbers(values)
    if is_text(values.type):
        first = next((text for text in values[:100].to_pylist() if text and text.strip()), "")
        if not reads_as_number(first):
            return None
        coded = pc.match_substring_regex(values, r"^\s*-?0\d")
        if pc.any(coded).as_py():
            return None
    try:
        return read_numbers(values, finite=False)  # fitting refuses infinite ones, with their row
    except BadValue:
        return None


def _find_separator(keys: pa.Array) -> str | None:
    """The separator of a multi feature; None if values are single ones."""
    there = keys.drop_null()
    for separator in _SEPARATORS:
        found = pc.match_substring(there, separator)
        if len(there) and pc.mean(found.cast(pa.int8())).as_py() >= _SPLIT:
            return separator
    return None


def complete_kinds(features: Iterable[Feature], columns: Sequence[Column]) -> list[Feature]:
    """Gives declared features without a kind the inferred one. ValueError for a column that was
    left out by its values; the message says how to use it."""
    by_name = {column.feature.columns[0]: column for column in columns}
    found = []
    for feature in features:
        if feature.kind is None:
            column = by_name[feature.columns[0]]
            if not column.used:
                raise ValueError(
                    f"feature {feature.name!r} has no kind and none can be inferred "
                    f"({column.reason}): say which, as {feature.name}=categorical"
                )
            inferred = column.feature
            feature = replace(feature, kind=inferred.kind, separator=inferred.separator)
        found.append(feature)
    return found
