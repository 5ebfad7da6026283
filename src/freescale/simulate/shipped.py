"""Files that the package ships by name: networks, recovery costs, calibrations."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any


def list_names(folder: Path, suffix: str = ".toml") -> list[str]:
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def find_file(folder: Path, name: str | Path, suffix: str, what: str) -> Path:
    """A shipped file by its name, or one of the user's own. ValueError if there is none."""
    shipped = list_names(folder, suffix)
    path = folder / f"{name}{suffix}" if str(name) in shipped else Path(name)
    if not path.is_file():
        raise ValueError(f"{name}: no such {what}; there is {', '.join(shipped)}, or a file")
    return path


def check_number(what: str, value: Any, above: bool = False) -> None:
    """Raises ValueError unless it is a finite number from 0 on, or `above` 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (above and value == 0):
        raise ValueError(f"{what} is {value!r}; it must be {'above 0' if above else '0 or more'}")


def read_toml(
    path: Path, known: Collection[str], needed: Collection[str], what: str
) -> dict[str, Any]:
    """Reads a TOML file without its `sources`. ValueError if it is not readable, or its keys are
    not those of `what`."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not readable as TOML ({error})") from error
    raw.pop("sources", None)  # the origin of the numbers, for people
    wrong = [f"unknown {name!r}" for name in sorted(set(raw) - set(known))]
    wrong += [f"{name!r} is missing" for name in sorted(set(needed) - set(raw))]
    if wrong:
        raise ValueError(f"{path}: {', '.join(wrong)}; {what} {', '.join(sorted(known))}")
    return raw
