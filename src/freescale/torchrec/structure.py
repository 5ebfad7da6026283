"""Splits batches of any form into leaves and puts them together again: nested dataclasses, named
tuples, dicts, lists and tuples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Path = str  # of a leaf: "sparse_features", "user.ids", "labels[0]"
Fill = Callable[[Iterator[Any]], Any]  # puts a batch together from its leaves, in their order


def take_apart(batch: Any, is_leaf: Callable[[Any], bool]) -> tuple[Fill, list[tuple[Path, Any]]]:
    """A function that fills the structure of a batch with other leaves, and its leaves with their
    paths. A batch may itself be a leaf."""
    leaves: list[tuple[Path, Any]] = []

    def visit(value: Any, path: Path) -> Fill:
        found = None if is_leaf(value) else _list_parts(value)
        if found is None:
            leaves.append((path or "batch", value))
            return next
        names, values, build = found
        fills = [visit(part, _join(path, name)) for name, part in zip(names, values, strict=True)]
        return lambda others: build([fill(others) for fill in fills])

    return visit(batch, ""), leaves


def _join(path: Path, name: Any) -> Path:
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else str(name)


def _list_parts(
    value: Any,
) -> tuple[Sequence[Any], Sequence[Any], Callable[[list[Any]], Any]] | None:
    """(names, parts, a function that rebuilds it from parts); None for a leaf."""
    kind = type(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        # a copy without the parts; a constructor might need other arguments
        empty = _with_fields(value, dict.fromkeys(names))
        return (
            names,
            [getattr(value, name) for name in names],
            lambda parts: _with_fields(empty, dict(zip(names, parts, strict=True))),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._fields, list(value), lambda parts: kind(*parts)
    if isinstance(value, dict):
        keys = list(value)
        none = copy.copy(value)
        none.clear()  # no constructor: a defaultdict needs another argument
        return (
            keys,
            [value[key] for key in keys],
            lambda parts: _with_items(none, zip(keys, parts, strict=True)),
        )
    if isinstance(value, (list, tuple)):
        return range(len(value)), list(value), lambda parts: kind(parts)
    return None


def _with_items(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    made = copy.copy(value)
    made.update(items)
    return made


def _with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    made = copy.copy(value)
    for name, part in fields.items():
        object.__setattr__(made, name, part)  # frozen ones too
    return made
