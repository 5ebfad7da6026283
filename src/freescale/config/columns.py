"""Parses `--columns` and `--labels`: the roles of the data's columns, and how labels are made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from freescale.config.options import split_names

ROLES = ("user", "item", "time", "rating", "action")
RESERVED = ("user_id", "item_id", "timestamp")  # columns that every history has
ORDER = "order"  # in place of a time column: rows are in order of time
_PLAIN = re.compile(r"[^=<>!]+")
_RULE = re.compile(
    r"(?P<name>[\w.-]+)\s*=(?!=)\s*(?P<column>[^=<>!]+?)\s*(?P<operator>==|!=|>=|<=|=|>|<)\s*"
    r"(?P<value>[^=<>!\s].*)"
)


@dataclass(frozen=True)
class Label:
    """A label column of ranking: a column of the data as it is, or the outcome of a comparison."""

    name: str
    column: str
    operator: str | None = None  # None: the column holds 0 and 1
    value: float | str = ""

    @property
    def text(self) -> str:
        """As it stands on the command line."""
        if self.operator is None:
            return self.name
        value = repr(self.value).removesuffix(".0")
        return f"{self.name}={self.column}{self.operator}{value}"


def parse_columns(text: str) -> dict[str, str]:
    """Parses `user=reviewer,item=sku` into columns by role. An empty column leaves the role out.
    ValueError for an unknown role, or without a `=`."""
    found: dict[str, str] = {}
    for part in split_names(text):
        role, equals, column = (piece.strip() for piece in part.partition("="))
        if not equals or role not in ROLES:
            raise ValueError(
                f"--columns has {part!r}: write role=column, with a role of {', '.join(ROLES)}"
            )
        if role in found:
            raise ValueError(f"--columns names {role} twice: {found[role]!r} and {column!r}")
        if not column and role in ("user", "item", "time"):
            raise ValueError(f"--columns names no column for {role}: write {role}=COLUMN")
        found[role] = column
    return found


def parse_labels(text: str) -> tuple[Label, ...]:
    """Parses `is_click,like=rating>=4` into labels. The value of a comparison is a number, or a
    string for `==` and `!=` (in quotes if it looks like a number). ValueError for what is neither a
    column nor a comparison with a name, and for a name that occurs twice or is reserved."""
    found: dict[str, Label] = {}
    for part in split_names(text):
        label = _parse_label(part)
        if label.name in RESERVED or (label.name == "action" and label.operator):
            raise ValueError(
                f"--labels has {part!r}: {label.name!r} is a column of every history; give the "
                "label another name"
            )
        if label.name in found:
            raise ValueError(f"--labels names {label.name!r} twice: give each label its own name")
        found[label.name] = label
    return tuple(found.values())


def _parse_label(part: str) -> Label:
    if _PLAIN.fullmatch(part):
        return Label(part, part)
    rule = _RULE.fullmatch(part)
    if rule is None:
        raise ValueError(
            f"--labels has {part!r}: name a column, or write name=column>=number "
            "(==, !=, >=, <=, >, <), as like=rating>=4"
        )
    operator = "==" if rule["operator"] == "=" else rule["operator"]
    value = _parse_value(rule["value"].strip())
    if value != value:
        raise ValueError(f"--labels has {part!r}: nothing compares with nan; write a number")
    if isinstance(value, str) and operator not in ("==", "!="):
        raise ValueError(
            f"--labels has {part!r}: {operator} compares numbers, {value!r} is none; "
            "use == or != for strings"
        )
    return Label(rule["name"], rule["column"], operator, value)


def _parse_value(text: str) -> float | str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    try:
        return float(text)
    except ValueError:
        return text
