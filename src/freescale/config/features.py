"""The features of items and events: what a user says of them, on the command line or in a schema
file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from freescale.config.columns import RESERVED
from freescale.config.options import split_names

KINDS = ("categorical", "multi", "numeric", "vector", "cross", "id")
SOURCES = ("item", "user", "event", "context")
OF_EVENTS = ("event", "context")  # both are columns of the interactions
# Parts of a request's features that are of no column of the interactions; and a column of --items
# or of the interactions, as `item:artist`.
PART_OF = ":"
REQUEST = ("user", "item", "hour")
USER, ITEM, HOUR = (f"request{PART_OF}{name}" for name in REQUEST)
AUTO, NONE = "auto", "none"
KEPT_SCHEMA = "features/schema.toml"  # in the folder of a run: a copy of its schema

_PART = re.compile(r"(?:(item|user|event|context)\.)?([^=:]+?)\s*(?:=\s*(\w+)\s*(?::\s*(.+))?)?")


@dataclass(frozen=True)
class Feature:
    """One feature."""

    name: str  # name of its column, or of the cross
    # `item`, `user` (columns of --items and --users), `event` or `context` (columns of the
    # interactions: what describes an event, and what is known before it)
    source: str
    kind: str | None  # one of KINDS; None: inferred from the values
    # columns of the source; a cross has several. If the columns of a request are not all of the
    # interactions, they are named `SOURCE:COLUMN`.
    columns: tuple[str, ...]
    # number of rows that the combinations of a cross are hashed into, or number of ids; 0: that of
    # the largest id in --items
    rows: int = 100_000
    buckets: int = 32  # buckets of a number, with about equally many training values
    separator: str = "|"  # separator of the values of a multi feature that is text
    least: int = 1  # training items or events of a category, else it counts as unknown

    @property
    def label(self) -> str:
        return f"{self.source}.{self.name}"

    @property
    def is_joined(self) -> bool:
        """Whether it describes a request by several sources."""
        return PART_OF in self.columns[0]

    @property
    def stored_columns(self) -> list[str]:
        """Of an event or a request: the columns of the interactions that it needs."""
        parts = (column.rpartition(PART_OF) for column in self.columns)
        return [name for source, _, name in parts if source in ("", "event")]


# The keys of a feature in a schema file, with their types and least values.
_KEYS: dict[str, tuple[type, Any]] = {
    "kind": (str, None),
    "columns": (list, None),
    "rows": (int, 1),
    "buckets": (int, 2),
    "separator": (str, None),
    "least": (int, 1),
}
_ONLY: dict[str, tuple[str, ...]] = {
    "columns": ("cross",),
    "rows": ("cross", "id"),
    "buckets": ("numeric",),
    "separator": ("multi",),
}


@dataclass(frozen=True)
class Request:
    """The features that a run uses. `listed` None: all that can be used of the sources in
    `all_of`."""

    listed: tuple[Feature, ...] | None = None
    all_of: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.listed) or bool(self.all_of)


def request_features(features: str, schema: str | None, given: Sequence[str]) -> Request:
    """Reads `--features` and `--schema`. Without either, all columns of the files of attributes are
    used. `given`: sources that have such a file, `item` and `user`. ValueError if the options
    exclude each other, or one is not valid."""
    if schema is not None:
        if features:
            raise ValueError(
                f"--schema {schema} and --features {features}: a schema lists all features; "
                "leave --features out"
            )
        return Request(read_schema(Path(schema)))
    if features == NONE:
        return Request()
    if features == AUTO:
        return Request(all_of=(*given, "event"))
    if not features:
        return Request(all_of=tuple(given))
    return Request(parse_features(features))


def parse_features(text: str) -> tuple[Feature, ...]:
    """Parses `category,price=numeric,tags=multi:;,brand*category=cross:50000,event.channel`.

    Each part is a column, then its kind, then one number or sign: the buckets of a number, the
    separator of a multi feature, the rows of a cross. `item.`, `user.` or `event.` before a column
    says which file, if several have it; `context.` says that it describes the request. The columns
    of a cross are joined by `*`. Those of a request may be `user`, `item`, `hour` and columns of
    --items, too: `user*artist=cross:100000`. ValueError for another form, or a feature that is
    named twice.
    """
    found: dict[str, Feature] = {}
    for part in split_names(text):
        feature = _parse_part(part)
        if feature.label in found:
            raise ValueError(f"--features names {feature.name!r} twice: name it once")
        found[feature.label] = feature
    return tuple(found.values())


def _parse_part(part: str) -> Feature:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(
            f"--features has {part!r}: write a column, or column=kind, as price=numeric; kinds are "
            f"{', '.join(KINDS)}"
        )
    source, name, kind, option = match.groups()
    columns = tuple(column.strip() for column in name.split("*"))
    if kind is not None and kind not in KINDS:
        raise ValueError(f"--features has {part!r}: kind {kind!r} is none of {', '.join(KINDS)}")
    if len(columns) > 1:
        kind = kind or "cross"
    _check_columns(columns, kind, f"--features has {part!r}")
    feature = Feature(name, source or "", kind, columns)
    if kind == "id":
        feature = replace(feature, rows=0)
    if option is None:
        return feature
    if kind == "multi":
        return replace(feature, separator=option)
    key = {"numeric": "buckets", "cross": "rows", "id": "rows"}.get(kind or "")
    least = _KEYS[key][1] if key else 0
    if key is None or not option.isdecimal() or int(option) < least:
        raise ValueError(
            f"--features has {part!r}: after the kind follows the number of buckets (numeric, 2 or "
            "more), the separator (multi) or the number of rows (cross, id)"
        )
    changed: dict[str, Any] = {key: int(option)}
    return replace(feature, **changed)


def _check_columns(columns: Sequence[str], kind: str | None, where: str) -> None:
    if (len(columns) > 1) != (kind == "cross"):
        raise ValueError(f"{where}: a cross has two columns or more, other kinds have one")
    for column in columns:
        if PART_OF in column:
            raise ValueError(f"{where}: column {column!r} has a {PART_OF!r}; rename it")
        if column in RESERVED:
            raise ValueError(
                f"{where}: {column!r} is a column of every history and no feature; rename the "
                "column, or leave it out"
            )


def read_schema(path: Path) -> tuple[Feature, ...]:
    """Reads a schema file: a table for each feature, `[item.NAME]`, `[user.NAME]`, `[event.NAME]`
    or `[context.NAME]`, with the keys of `Feature`. ValueError, with file, key and value, for one
    that cannot be read, and for a key or value that does not exist."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--schema {path}: {error}") from None
    features = []
    for source, tables in content.items():
        if source not in SOURCES or not isinstance(tables, dict):
            raise ValueError(
                f"{path}: [{source}] is no table of features; write [item.NAME], [user.NAME], "
                "[event.NAME] or [context.NAME]"
            )
        for name, keys in tables.items():
            features.append(_read_feature(path, source, name, keys))
    if not features:
        raise ValueError(
            f"{path}: no feature; write [item.NAME], [user.NAME] or [event.NAME], then its keys"
        )
    return tuple(features)


def _read_feature(path: Path, source: str, name: str, keys: Any) -> Feature:
    where = f"{path}: [{source}.{name}]"
    if not isinstance(keys, Mapping):
        raise ValueError(f"{where} is {keys!r}; write its keys below it, as kind = 'categorical'")
    for key, value in keys.items():
        if key not in _KEYS:
            raise ValueError(f"{where} has key {key!r}, which is none of {', '.join(_KEYS)}")
        needed, least = _KEYS[key]
        if type(value) is not needed or (least is not None and value < least):
            words = {"kind": "text", "separator": "text", "columns": "a list of columns"}
            wanted = words.get(key, f"a number from {least} on")
            raise ValueError(f"{where}: {key} = {value!r} is not {wanted}")
    kind = keys.get("kind")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"{where}: kind = {kind!r} is none of {', '.join(KINDS)}")
    for key, owners in _ONLY.items():
        if key in keys and kind not in owners:
            names = " or ".join(map(repr, owners))
            raise ValueError(f"{where}: {key} = {keys[key]!r} is a key of kind = {names}")
    columns = tuple(map(str, keys.get("columns", [name])))
    _check_columns(columns, kind, where)
    others = {key: value for key, value in keys.items() if key not in ("kind", "columns")}
    if kind == "id":
        others.setdefault("rows", 0)
    return Feature(name, source, kind, columns, **others)


def write_schema(features: Iterable[Feature], notes: Mapping[str, str]) -> str:
    """The text of a schema file, with a comment for each feature by label."""
    usual = {entry.name: entry.default for entry in fields(Feature)}
    parts = []
    for feature in features:
        lines = [f"# {notes[feature.label]}"] if feature.label in notes else []
        lines.append(f"[{feature.source}.{_quote(feature.name)}]")
        for key in _KEYS:
            value = getattr(feature, key)
            if key in _ONLY and (feature.kind not in _ONLY[key] or value == 0):
                continue
            if key == "columns":
                value = tuple(column.rpartition(PART_OF)[2] for column in value)
            if key == "least" and value == usual[key]:
                continue
            lines.append(f"{key} = {_spell(value)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _quote(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name) else _spell(name)


def _spell(value: Any) -> str:
    """In TOML, whose numbers, strings and lists are those of JSON."""
    return json.dumps(value, ensure_ascii=False)
