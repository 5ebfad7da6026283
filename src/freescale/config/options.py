"""What a setting is: a field with its default, help and limits."""

from __future__ import annotations

import json
from dataclasses import asdict, field, fields
from typing import Any, ClassVar


def option(
    default: Any, help: str, heading: str | None = None, common: bool = False, **checks: Any
) -> Any:
    """A field with its help text and checks (`minimum`, `maximum`, `choices`, `above`, `below`;
    `words`: that stand for a number).
    `heading`: where it stands in the help, if not under that of its class; `common`: whether it
    is one of the few that --help shows (--help-all shows every one). `formerly`, among the checks:
    what runs did whose config.json does not have the setting, where that is not the default."""
    shown = {"help": help, "common": common} | ({"heading": heading} if heading else {})
    return field(default=default, metadata={**shown, **checks})


def split_names(text: str) -> tuple[str, ...]:
    """Of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_number(text: str) -> int | str:
    """A whole number, or a word that stands for one."""
    return int(text) if text.lstrip("-").isdigit() else text


class Checked:
    heading: ClassVar[str] = "Options"  # under which the help lists the settings

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value, rules = getattr(self, entry.name), entry.metadata
            flag = "--" + entry.name.replace("_", "-")
            words = rules.get("words", ())
            if value is None or value in words:
                continue
            if words and not isinstance(value, int):
                raise ValueError(f"{flag} must be a number or {', '.join(words)}, not {value!r}")
            if "choices" in rules and value not in rules["choices"]:
                raise ValueError(
                    f"{flag} must be one of {', '.join(rules['choices'])}, not {value!r}"
                )
            if "minimum" in rules and not value >= rules["minimum"]:
                raise ValueError(f"{flag} must be at least {rules['minimum']}, got {value}")
            if "maximum" in rules and not value <= rules["maximum"]:
                raise ValueError(f"{flag} must be at most {rules['maximum']}, got {value}")
            if "above" in rules and not value > rules["above"]:
                raise ValueError(f"{flag} must be above {rules['above']}, got {value}")
            if "below" in rules and not value < rules["below"]:
                raise ValueError(f"{flag} must be below {rules['below']}, got {value}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)  # type: ignore[call-overload]
