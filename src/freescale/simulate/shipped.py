"""Files that the package ships by name: networks, recovery costs, calibrations."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any


def list_names(folder: Path, suffix: str = ".toml") -> list[str]:
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


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
