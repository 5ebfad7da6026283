"""What a setting is: a field with its default, help and limits."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import asdict, field, fields
from typing import Any, ClassVar

_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}


def option(
    default: Any, help: str, heading: str | None = None, common: bool = False, **checks: Any
) -> Any:
    """A field with its help text and checks (`minimum`, `maximum`, `choices`, `above`, `below`;
    `words`: words that stand for a number).
    `heading`: its section of the help, if not that of its class; `common`: whether --help shows it
    (--help-all shows all). Among the checks, `flag_value`: of the option alone;
    `formerly`: the value for a config.json without the setting, if not the default;
    `former_choices`: values that are accepted and not shown."""
    shown = {"help": help, "common": common} | ({"heading": heading} if heading else {})
    return field(default=default, metadata={**shown, **checks})


def split_names(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_number(text: str) -> int | str:
    """A whole number, or a word that stands for one."""
    return int(text) if text.lstrip("-").isdigit() else text


class Checked:
    """Settings whose values are checked."""

    heading: ClassVar[str] = "Options"  # section of the help

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value, rules = getattr(self, entry.name), entry.metadata
            flag = "--" + entry.name.replace("_", "-")
            words = rules.get("words", ())
            if value is None or value in words:
                continue
            if words and not isinstance(value, int):
                raise ValueError(f"{flag} must be a number or {', '.join(words)}, not {value!r}")
            accepted = (*rules.get("choices", ()), *rules.get("former_choices", ()))
            if accepted and value not in accepted:
                raise ValueError(
                    f"{flag} must be one of {', '.join(rules['choices'])}, not {value!r}"
                )
            for rule, (fits, words) in _LIMITS.items():
                if rule in rules and not fits(value, rules[rule]):
                    raise ValueError(f"{flag} must be {words} {rules[rule]}, got {value}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)  # type: ignore[call-overload]
