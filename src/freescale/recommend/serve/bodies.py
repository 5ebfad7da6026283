"""Bodies of requests, from bytes to checked values. Nothing in a body is trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from freescale.recommend.serve.schema import EVENT, Schema

# What the plain reader lets through: integers beyond int64, halves of surrogate pairs.
_ODD = re.compile(rb"\d{19}|\\u[dD][89a-fA-F]")
_INT64 = range(-(1 << 63), 1 << 63)
_LATEST = 1 << 62  # times: two of them differ by an int64
_KINDS = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip
_LATER = {"retry-after": "1"}
_PLAIN = {str, int, float, bool, type(None)}


class Refused(Exception):
    """A request that is not answered: the field that is wrong, and how to fix it."""

    def __init__(self, field: str, message: str, fix: str, status: int = 400) -> None:
        super().__init__(message)
        # the rest of a body that is too large or late is not read
        close = {"connection": "close"}
        known = {401: {"www-authenticate": "Bearer"}, 408: close, 413: close, 503: _LATER}
        self.status, self.headers = status, known.get(status, {})
        self.content = {"error": {"field": field, "message": message, "fix": fix}}


def parse_body(body: bytes) -> Any:
    """Parses JSON strictly: no NaN, no duplicate keys, integers of 64 bits."""
    odd = _ODD.search(body) is not None
    try:
        found = json.loads(
            body.decode(),
            object_pairs_hook=_read_pairs,
            parse_float=_read_float,
            parse_constant=_read_float,
            parse_int=_read_int if odd else None,
        )
        if odd:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError:
        raise Refused("body", "the body is not valid UTF-8", "send JSON in UTF-8") from None
    except RecursionError:
        raise Refused("body", "the body is nested too deeply", "send what /docs shows") from None
    except ValueError as error:
        raise Refused("body", f"the body is no JSON: {error}", "send a JSON object") from None
    return found


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:60]!r} occurs twice in an object")
    return found


def _read_float(text: str) -> float:
    value = float(text)
    if not abs(value) < float("inf"):
        raise ValueError(f"{text[:30]} is not a finite number")
    return value


def _read_int(text: str) -> int:
    if len(text) > 20 or (value := int(text)) not in _INT64:
        raise ValueError(f"{text[:30]} has more than 64 bits")
    return value


def check(value: Any, schema: Schema, field: str) -> None:
    """Checks a value against the part of JSON Schema that `schema.py` uses."""
    if schema is EVENT and _is_plain_event(value):
        return
    kind = _KINDS[type(value)]
    if kind not in schema["type"]:
        wanted = " or ".join(schema["type"])
        raise Refused(field, f"{field} is {_show(value)}", f"give {wanted}")
    if kind == "integer" and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        fix = f"give {schema['minimum']} to {schema['maximum']}"
        raise Refused(field, f"{field} is {value}", fix)
    if kind == "string" and len(value) > schema.get("maxLength", len(value)):
        fix = f"give at most {schema['maxLength']} characters"
        raise Refused(field, f"{field} has {len(value)} characters", fix)
    if kind == "array":
        _check_list(value, schema, field)
    if kind == "object":
        _check_object(value, schema, field)


def _check_list(values: Sequence[Any], schema: Schema, field: str) -> None:
    most, least = schema.get("maxItems", len(values)), schema.get("minItems", 0)
    if not least <= len(values) <= most:
        message = f"{field} has {len(values)} entries"
        raise Refused(field, message, f"give {least} to {most}")
    for number, value in enumerate(values):
        check(value, schema["items"], f"{field}[{number}]")


def _check_object(values: Mapping[str, Any], schema: Schema, field: str) -> None:
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    inside = "" if field == "body" else f"{field}."
    for name in schema.get("required", ()):
        if name not in values:
            raise Refused(inside + name, f"{inside}{name} is missing", f"give {name}")
    for name, value in values.items():
        if name in known or others:
            check(value, known.get(name, others), inside + name[:60])
        else:
            fix = f"the fields are {', '.join(known)}"
            raise Refused(inside + name[:60], f"there is no field {name[:60]!r}", fix)


def _is_plain_event(event: Any) -> bool:
    if type(event) is list:
        return 1 <= len(event) <= 3 and _PLAIN.issuperset(map(type, event))
    return type(event) is int or type(event) is str


def check_times(times: Any, field: str) -> None:
    """`times`: int64 array, or None."""
    if times is not None and len(times) and not -_LATEST < times.min() <= times.max() < _LATEST:
        raise Refused(field, "a time is too large", "give times of less than 62 bits")


def _show(value: Any) -> str:
    if type(value) in (list, dict):
        return f"an {_KINDS[type(value)]}"
    return f"{value!r:.60}"


def split_body(body: Any, schema: Schema) -> tuple[list[dict[str, Any]], list[str]]:
    """Checks a body. Returns its requests, and where each is: `requests[0].`, or nothing."""
    one, *several = schema.get("oneOf", [schema])
    if several and type(body) is dict and "requests" in body:
        _check_object(body, several[0], "body")
        return body["requests"], [f"requests[{n}]." for n in range(len(body["requests"]))]
    check(body, one, "body")
    return [body], [""]
