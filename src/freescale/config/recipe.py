"""Recipes: settings of `freescale train` by name, in TOML files. The package ships `recipes/`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from freescale.config.data import DataConfig
from freescale.config.model import ModelConfig
from freescale.config.train import TrainConfig

RECIPES = Path(__file__).parent / "recipes"
_KINDS: tuple[Any, ...] = (DataConfig, ModelConfig, TrainConfig)
_TYPES: dict[str, Any] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
_TYPES["int | str"] = (int, str)


@dataclass(frozen=True)
class Recipe:
    """Settings that belong together."""

    name: str
    description: str  # one line
    settings: Mapping[str, Any]


def list_recipes() -> list[Recipe]:
    """Lists the recipes of the package, by name."""
    return [read_recipe(path.stem) for path in sorted(RECIPES.glob("*.toml"))]


def read_recipe(name: str) -> Recipe:
    """Reads a recipe of the package by its name, or a file that ends in .toml.

    Keys of the file are options of `freescale train` without their dashes, and `description`.
    ValueError if there is no such recipe or the file is wrong.
    """
    own = name.endswith(".toml")
    path = Path(name) if own else RECIPES / f"{name}.toml"
    if not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
        there = f"no file {name}" if own else f"no recipe {name!r}"
        raise ValueError(
            f"--recipe: there is {there}; the package has {shipped}, and a file of your own ends "
            "in .toml"
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path}: not valid TOML: {error}") from None
    description = raw.pop("description", "")
    if not isinstance(description, str):
        raise ValueError(f"recipe {path}: description must be a line of text, not {description!r}")
    settings = {}
    for key, value in raw.items():
        setting = key.replace("-", "_")
        if setting in settings:
            raise ValueError(f"recipe {path}: {key!r} is there twice")
        settings[setting] = _check_value(path, key, value)
    for kind in _KINDS:
        known = {entry.name for entry in fields(kind)}
        try:
            kind(**{name: value for name, value in settings.items() if name in known})
        except ValueError as error:
            raise ValueError(f"recipe {path}: {error}") from None
    return Recipe(name, description, settings)


def expand_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the settings of the named recipe to those that were given, which take precedence."""
    name = given.get("recipe")
    if name is None:
        return dict(given)
    own = {key: value for key, value in given.items() if value is not None}
    return {**read_recipe(name).settings, **own}


def _check_value(path: Path, key: str, value: Any) -> Any:
    known = find_settings()
    entry = known.get(key.replace("-", "_"))
    if entry is None:
        near = difflib.get_close_matches(key.replace("-", "_"), known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"recipe {path}: {key!r} is no option that a recipe sets{hint}")
    kind = str(entry.type).removesuffix(" | None")
    if not isinstance(value, _TYPES[kind]) or (kind != "bool" and isinstance(value, bool)):
        raise ValueError(f"recipe {path}: {key!r} must be of type {kind}, not {value!r}")
    return float(value) if kind == "float" else value


def find_settings() -> dict[str, Field[Any]]:
    """Everything that a recipe may set: all options except the recipe itself."""
    known = {entry.name: entry for kind in _KINDS for entry in fields(kind)}
    del known["recipe"]
    return known
