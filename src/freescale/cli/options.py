"""Converts settings (freescale.config) to command-line options, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from freescale.cli.layout import grouped_option
from freescale.config.options import read_number
from freescale.stores.path import as_path, is_store

F = TypeVar("F", bound=Callable[..., Any])


class _Path(click.Path):
    """A path on a disk or in an object store."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return as_path(value) if is_store(value) else super().convert(value, param, ctx)
        except ValueError as error:
            self.fail(str(error), param, ctx)


PATH = _Path(path_type=Path)  # the type of an option


class _NumberOrWord(click.ParamType):  # type: ignore[type-arg]
    """An integer or a word such as `auto`. The settings class checks which words are allowed."""

    name = "integer or word"

    def convert(self, value: Any, param: object, ctx: object) -> int | str:
        return read_number(str(value))


class _Choice(click.Choice):  # type: ignore[type-arg]
    """Accepts former choices as well, which the help does not show."""

    def __init__(self, choices: Collection[str], former: Collection[str]) -> None:
        super().__init__(tuple(choices))
        self._former = former

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value in self._former else super().convert(value, param, ctx)


_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "int | str": _NumberOrWord()}


def add_settings(*kinds: Any, only: Collection[str] | None = None) -> Callable[[F], F]:
    """Decorates a command with one option per field of the settings classes `kinds`; `only` limits
    them to the named fields. An option that is not given is None: defaults belong to the class."""

    def add(function: F) -> F:
        for kind in reversed(kinds):
            for entry in reversed(fields(kind)):
                if only is None or entry.name in only:
                    function = _make_option(entry, kind.heading)(function)
        return function

    return add


def _make_option(entry: Field[Any], heading: str) -> Callable[[F], F]:
    base = str(entry.type).removesuffix(" | None")
    flag = entry.name.replace("_", "-")
    name = f"--{flag}/--no-{flag}" if base == "bool" else f"--{flag}"
    choices, former = (entry.metadata.get(name, ()) for name in ("choices", "former_choices"))
    kind = None if base == "bool" else _Choice(choices, former) if choices else _TYPES[base]
    alone = entry.metadata.get("flag_value")  # value of the option when it is given without one
    return grouped_option(
        name,
        entry.name,
        **({} if alone is None else {"is_flag": False, "flag_value": alone}),
        heading=entry.metadata.get("heading", heading),
        common=entry.metadata["common"],
        type=kind,
        default=None,
        help=_describe(entry),
    )


def _describe(entry: Field[Any]) -> str:
    text: str = entry.metadata["help"]
    default = entry.default if entry.default is not MISSING else None
    return text if default in (None, "") else f"{text}  [default: {default}]"


def select_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def format_arguments(options: Mapping[str, Any]) -> list[str]:
    """Formats options as command-line arguments."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", str(value)]
    return arguments
