"""Bodies of requests, from bytes to checked values. Nothing in a body is trusted."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from freescale.recommend.serve.schema import EVENT, Schema

_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_INT64 = range(-(1 << 63), 1 << 63)
_KINDS = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip
_SCALARS = {str, int, float, bool, type(None)}
_HEADERS = {408: {"connection": "close"}, 503: {"retry-after": "1"}}


class Refused(Exception):
    """A request that is not answered: the field that is wrong, and how to fix it."""

    def __init__(self, field: str, message: str, fix: str, status: int = 400) -> None:
        super().__init__(message)
        self.status, self.headers = status, _HEADERS.get(status)
        self.content = {"error": {"field": field, "message": message, "fix": fix}}


def read_body(body: bytes, schema: Schema) -> tuple[list[dict[str, Any]], list[str]]:
    """Parses and checks a body. Returns its requests, and where each is: `requests[0].`, or
    nothing."""
    found = _parse(body)
    one, *several = schema["oneOf"]
    if several and type(found) is dict and "requests" in found:
        _check(found, several[0], "body")
        return found["requests"], [f"requests[{n}]." for n in range(len(found["requests"]))]
    _check(found, one, "body")
    return [found], [""]


def _parse(body: bytes) -> Any:
    """Parses JSON strictly: no NaN, no duplicate keys, integers of 64 bits."""
    # integers beyond int64, halves of surrogate pairs: the plain reader lets them through
    odd = b"0" * 19 in body.translate(_DIGITS) or b"\\u" in body
    try:
        found = json.loads(
            body.decode(), object_pairs_hook=_read_pairs, parse_float=_read_float,
            parse_constant=_read_float, parse_int=_read_int if odd else None,
        )  # fmt: skip
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
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:60]!r} occurs twice in an object")
        found[name] = value
    return found


def _read_float(text: str) -> float:
    if not abs(value := float(text)) < float("inf"):
        raise ValueError(f"{text[:30]} is not a finite number")
    return value


def _read_int(text: str) -> int:
    if len(text) > 20 or (value := int(text)) not in _INT64:
        raise ValueError(f"{text[:30]} has more than 64 bits")
    return value


def _check(value: Any, schema: Schema, field: str) -> None:
    """Checks a value against the part of JSON Schema that `schema.py` uses."""
    kind = _KINDS[type(value)]
    if kind not in schema["type"]:
        shown = f"an {kind}" if kind in ("array", "object") else f"{value!r:.60}"
        raise Refused(field, f"{field} is {shown}", f"give {' or '.join(schema['type'])}")
    if kind == "integer":
        _check_range(field, value, schema, "minimum", "maximum", "")
    elif kind == "string":
        _check_range(field, len(value), schema, "minLength", "maxLength", " characters")
    elif kind == "array":
        _check_range(field, len(value), schema, "minItems", "maxItems", " entries")
        if schema["items"] is EVENT and _are_plain(value):
            return
        for number, one in enumerate(value):
            _check(one, schema["items"], f"{field}[{number}]")
    elif kind == "object":
        _check_object(value, schema, "" if field == "body" else f"{field}.")


def _are_plain(events: list[Any]) -> bool:
    """Whether they are items, or lists as EVENT has them: most are, and this is quick."""
    kinds = {*map(type, events)}
    if kinds != {list}:
        return kinds <= {int, str}
    return {*map(len, events)} <= {1, 2, 3} and _SCALARS.issuperset(
        map(type, chain.from_iterable(events))
    )


def _check_range(field: str, size: int, schema: Schema, least: str, most: str, unit: str) -> None:
    low, high = schema.get(least, size), schema.get(most, size)
    if not low <= size <= high:
        fix = f"give at most {high}{unit}" if size > high else f"give at least {low}{unit}"
        raise Refused(
            field, f"{field} is {size}{unit}" if not unit else f"{field} has {size}{unit}", fix
        )


def _check_object(values: dict[str, Any], schema: Schema, inside: str) -> None:
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    for name in schema.get("required", ()):
        if name not in values:
            raise Refused(inside + name, f"{inside}{name} is missing", f"give {name}")
    for name, value in values.items():
        if name not in known and not others:
            fix = f"the fields are {', '.join(known)}"
            raise Refused(inside + name[:60], f"there is no field {name[:60]!r}", fix)
        _check(value, known.get(name, others), inside + name[:60])
