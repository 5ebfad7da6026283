"""What the bodies of requests hold: JSON Schema, for the checks, /openapi.json and /docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from freescale import __version__

Schema = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What a server accepts, and how much it keeps.

    Attributes:
        batch: requests that the model answers at a time.
        wait: seconds that a request waits for others.
        queue: requests that wait or are being answered.
        memory: bytes of the events of users.
        kept: events of a user beyond the model's max_length.
        body: bytes of a request.
        requests: of one body.
    """

    batch: int = 16
    wait: float = 0.002
    queue: int = 64
    memory: int = 256 << 20
    kept: int = 1000
    body: int = 1 << 20
    requests: int = 64
    k: int = 1000
    history: int = 10_000
    candidates: int = 10_000


_SCALAR: Schema = {"type": ["string", "integer", "number", "boolean", "null"]}
_VALUE: Schema = {"type": [*_SCALAR["type"], "array"], "items": _SCALAR}
EVENT: Schema = {
    "description": "an item; [item, time] or [item, time, action]; or values by column",
    "type": ["string", "integer", "array", "object"],
    "items": _SCALAR,
    "minItems": 1,
    "maxItems": 3,
    "additionalProperties": _VALUE,
}


def make_schemas(limits: Limits) -> dict[str, Schema]:
    """The body of each path."""

    def make_list(most: int, of: Schema, text: str, least: int = 0) -> Schema:
        more = {"minItems": least, "maxItems": most, "items": of}
        return {"type": ["array"], "description": text, **more}

    def make_object(text: str) -> Schema:
        return {"type": ["object"], "description": text, "additionalProperties": _VALUE}

    def make_flag(text: str) -> Schema:
        return {"type": ["boolean"], "description": text}

    item: Schema = {"type": ["string", "integer"]}
    user = {
        "type": ["string", "integer"],
        "maxLength": 256,
        "description": "of the run's data, or with events posted here; ids compare as text",
    }
    who = {
        "user": user,
        "history": make_list(limits.history, EVENT, "events, instead of a user"),
        "context": make_object("columns of the request, if the model reads them"),
        "attributes": make_object("columns of the user, if the model reads them"),
        "describe": make_flag("add the categories of the items"),
    }
    number = {"type": ["integer"], "minimum": 1, "maximum": limits.k, "default": 10}
    recommend = who | {
        "k": number | {"description": "how many items"},
        "exclude_seen": make_flag("leave out the items of the history"),
        "candidates": make_list(limits.candidates, item, "ids of the items to choose from", 1),
        "filter": make_list(
            16, {"type": ["string"]}, "items with a value of a feature: category=shoes|boots"
        ),
    }
    score = who | {
        "candidates": make_list(limits.candidates, item, "ids of the items to score", 1),
        "at": {
            "type": ["string", "integer", "number"],
            "description": "time of the request, for a ranking model with a time bias",
        },
    }
    events = {
        "user": user,
        "events": make_list(limits.history, EVENT, "new events", 1),
        "attributes": who["attributes"],
    }
    found = {
        "/recommend": _close(recommend, ()),
        "/score": _close(score, ("candidates",)),
        "/events": _close(events, ("user", "events")),
    }
    for path in ("/recommend", "/score"):
        some = make_list(limits.requests, found[path], "several requests, instead of one", 1)
        found[path] = {"oneOf": [found[path], _close({"requests": some}, ("requests",))]}
    return found


def _close(properties: Mapping[str, Schema], required: tuple[str, ...]) -> Schema:
    more = {"properties": dict(properties), "additionalProperties": False}
    return {"type": ["object"], "required": list(required), **more}


_ABOUT = {
    "/recommend": ("post", "the best items for a user or a history"),
    "/score": ("post", "scores of given items"),
    "/events": ("post", "appends events to those of a user; the next request reads them"),
    "/items": ("get", "items whose id contains ?q=, the most frequent first"),
    "/users": ("get", "users whose id begins with ?q="),
    "/healthz": ("get", "200 while the server accepts requests; needs no token"),
    "/metrics": ("get", "figures for Prometheus"),
}
_ANSWERS = {
    "200": "the answer; with `requests`, a list of `results`",
    "400": "a field is wrong: `error` has the field, what is wrong and the fix",
    "401": "the token is missing or wrong",
    "404": "the user has no events here",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "503": "the queue is full, or the server stops: try again after Retry-After seconds",
}


def describe_api(schemas: Mapping[str, Schema]) -> Schema:
    """The document /openapi.json."""
    paths: dict[str, Any] = {}
    for path, (method, text) in _ABOUT.items():
        known = _ANSWERS if path in schemas else {"200": _ANSWERS["200"].partition(";")[0]}
        about: Schema = {"summary": text}
        about["responses"] = {code: {"description": answer} for code, answer in known.items()}
        if path in schemas:
            content = {"application/json": {"schema": schemas[path]}}
            about["requestBody"] = {"required": True, "content": content}
        paths[path] = {method: about}
    info = {"title": "freescale serve", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def render_docs(schemas: Mapping[str, Schema]) -> str:
    """The page /docs, which loads nothing."""
    parts = []
    for path, (method, text) in _ABOUT.items():
        parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{escape(text)}</p>")
        if path not in schemas:
            continue
        options = schemas[path].get("oneOf", [schemas[path]])
        rows = [
            f"<tr><th scope=row><code>{name}</code><td>{' or '.join(field['type'])}"
            f"<td>{escape(field.get('description', ''))}<td>{_describe_limits(field)}"
            for option in options
            for name, field in option["properties"].items()
        ]
        head = "<tr><th scope=col>field<th scope=col>type<th scope=col>what<th scope=col>limits"
        parts.append(f"<table>{head}{''.join(rows)}</table>")
    answers = "".join(f"<li><b>{code}</b> {text}" for code, text in _ANSWERS.items())
    style = "body{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}"
    style += ":root{color-scheme:light dark}td,th{text-align:left;padding:.1em 1em .1em 0}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>freescale serve</title>"
        f"<style>{style}</style><h1>freescale serve</h1>{''.join(parts)}<h2>Answers</h2>"
        f"<ul>{answers}</ul><p>An event is {escape(EVENT['description'])}.</p>"
    )


def _describe_limits(field: Schema) -> str:
    names = ("minimum", "maximum", "minItems", "maxItems", "maxLength")
    return ", ".join(f"{name} {field[name]:,}" for name in names if field.get(name))
