"""What the bodies of requests hold: JSON Schema, for the checks, /openapi.json and /docs."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from freescale import __version__
from freescale.config import ServeConfig

Schema = dict[str, Any]


def _make(types: str, text: str = "", **more: Any) -> Schema:
    return {"type": types.split("|"), "description": text, **more}


_SCALAR = _make("string|integer|number|boolean|null")
_VALUE = _make("string|integer|number|boolean|null|array", items=_SCALAR)
EVENT = _make(
    "string|integer|array|object", "an item; [item, time, action]; or values by column",
    items=_SCALAR, minItems=1, maxItems=3, additionalProperties=_VALUE,
)  # fmt: skip


def make_schemas(config: ServeConfig) -> dict[str, Schema]:
    """The body of each path."""
    item, text = _make("string|integer"), _make("string")
    user = _make("string|integer", "whose events are here; ids compare as text", maxLength=256)
    history: Any = {"items": EVENT, "maxItems": config.max_history}
    some: Any = {"items": item, "minItems": 1, "maxItems": config.max_candidates}
    columns: Any = {"additionalProperties": _VALUE}
    attributes = _make("object", "columns of the user, if the model reads them", **columns)
    who = {
        "user": user,
        "history": _make("array", "events, instead of a user", **history),
        "attributes": attributes,
        "context": _make("object", "columns of the request, if the model reads them", **columns),
        "describe": _make("boolean", "add the categories of the items"),
    }
    recommend = who | {
        "k": _make("integer", "how many items (10)", minimum=1, maximum=config.max_k),
        "exclude_seen": _make("boolean", "leave out the items of the history"),
        "candidates": _make("array", "ids of the items to choose from", **some),
        "filter": _make("array", "as category=shoes|boots: all must fit", items=text, maxItems=16),
    }
    score = who | {
        "candidates": _make("array", "ids of the items to score", **some),
        "at": _make("string|integer|number", "time of the request, for a ranking model"),
    }
    events = {
        "user": user,
        "events": _make("array", "new events", minItems=1, **history),
        "attributes": attributes,
    }
    several: Any = {"minItems": 1, "maxItems": config.max_requests}
    found = {"/recommend": _close(recommend), "/score": _close(score, "candidates")}
    for path, one in found.items():
        requests = _make("array", "several of these, instead of one", items=one, **several)
        found[path] = {"oneOf": [one, _close({"requests": requests}, "requests")]}
    return found | {"/events": {"oneOf": [_close(events, "user", "events")]}}


def _close(properties: Mapping[str, Schema], *required: str) -> Schema:
    more: Any = {"required": list(required), "additionalProperties": False}
    return _make("object", properties=dict(properties), **more)


_PATHS = {
    "/recommend": "the best items for a user or a history",
    "/score": "scores of items",
    "/events": "appends events to those of a user, which the next request reads",
    "/items": "items whose id contains ?q=, the most frequent first",
    "/users": "users whose id begins with ?q=",
    "/healthz": "whether the server accepts requests; needs no token",
    "/metrics": "figures for Prometheus",
}
_ANSWERS = {
    "200": "the answer; with `requests`, all of them as `results`",
    "400": "a field is wrong: `error` has the `field`, a `message` and the `fix`",
    "401": "the token is missing or wrong",
    "404": "the user has no events here",
    "408": "the body does not arrive in time",
    "413": "the body is too large",
    "503": "the queue is full, or the server stops: try again after Retry-After seconds",
}


def describe_api(schemas: Mapping[str, Schema]) -> Schema:
    """The document /openapi.json."""
    paths: dict[str, Schema] = {}
    for path, text in _PATHS.items():
        answers = {code: {"description": answer} for code, answer in _ANSWERS.items()}
        about: Schema = {"summary": text, "responses": answers}
        if path in schemas:
            content = {"application/json": {"schema": schemas[path]}}
            about["requestBody"] = {"required": True, "content": content}
        paths[path] = {"post" if path in schemas else "get": about}
    info = {"title": "freescale serve", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def render_docs(schemas: Mapping[str, Schema]) -> str:
    """The page /docs, which loads nothing."""
    parts = []
    for path, text in _PATHS.items():
        method = "POST" if path in schemas else "GET"
        rows = [
            f"<dt><code>{name}</code><dd>{escape(field['description'])} "
            f"<small>{' or '.join(field['type'])}{_name_limits(field)}</small>"
            for one in schemas.get(path, {"oneOf": []})["oneOf"]
            for name, field in one["properties"].items()
        ]
        parts.append(f"<h2>{method} {path}</h2><p>{escape(text)}<dl>{''.join(rows)}</dl>")
    answers = "".join(f"<dt>{code}<dd>{escape(text)}" for code, text in _ANSWERS.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>freescale serve</title><style>"
        ":root{color-scheme:light dark}body{font:15px/1.5 system-ui;max-width:50em;margin:auto}"
        f"</style><h1>freescale serve</h1>{''.join(parts)}<h2>Events</h2><p>An event is "
        f"{escape(EVENT['description'])}.<h2>Answers</h2><dl>{answers}</dl>"
    )


def _name_limits(field: Schema) -> str:
    names = ("minimum", "maximum", "minItems", "maxItems", "maxLength")
    return "".join(f", {name} {field[name]:,}" for name in names if name in field)
