"""Bodies of requests that a server must refuse or answer, never fail at."""

from __future__ import annotations

import json
from random import Random
from typing import Any

_TEXTS = (
    "",
    "a",
    "7",
    "-1",
    "s01",
    "\ud800",
    "\x00",
    "é" * 40,
    "9" * 400,
    "1e400",
    "NaN",
    "a=b",
    "category=k1",
)
_NUMBERS = (
    0,
    1,
    -1,
    3,
    1.5,
    1700000000,
    2**31,
    2**53 + 1,
    2**62,
    2**63 - 1,
    -(2**63),
    2**63,
    10**30,
    1e300,
    True,
    None,
)
_FIELDS = (
    "user", "history", "events", "k", "exclude_seen", "candidates", "filter", "context",
    "attributes", "describe", "requests", "at", "nothing", "item", "time", "action",
    "timestamp", "channel", "",
)  # fmt: skip


def make_request(random: Random) -> tuple[str, bytes]:
    """Path and body."""
    path = random.choice(("/recommend", "/score", "/events"))
    if random.random() < 0.1:
        return path, _make_bytes(random)
    value = _make_body(random, path) if random.random() < 0.8 else _make_value(random, 4)
    body = json.dumps(value).encode()
    if random.random() < 0.15:
        body = _damage(random, body)
    return path, body


def _make_bytes(random: Random) -> bytes:
    deep = random.choice((10, 1000, 100_000))
    chosen: bytes = random.choice(
        (
            random.randbytes(random.randrange(200)),
            b"[" * deep,
            b'{"user":' * deep,
            b'{"history":[' + b"[" * deep + b"]" * deep + b"]}",
            b'{"user":"a","user":"b"}',
            b'{"history":[NaN,Infinity,-Infinity]}',
            b'{"k":1e999,"history":[]}',
            b'{"history":[' + b"9" * 5000 + b"]}",
            b'{"user":"\\ud800"}',
            b'{"user":"\xff\xfe"}',
            '{"user":"a"}'.encode("utf-16"),
            b"",
        )
    )
    return chosen


def _make_value(random: Random, depth: int) -> Any:
    kind = random.randrange(7 if depth else 4)
    if kind < 2:
        return random.choice(_NUMBERS)
    if kind < 4:
        return random.choice(_TEXTS)
    if kind < 6:
        return [_make_value(random, depth - 1) for _ in range(random.randrange(5))]
    return {
        random.choice((*_FIELDS, *_TEXTS)): _make_value(random, depth - 1)
        for _ in range(random.randrange(5))
    }


def _make_event(random: Random) -> Any:
    item, time = random.choice((*range(5), *_TEXTS, *_NUMBERS)), random.choice(_NUMBERS)
    return random.choice(
        (
            item,
            [item, time],
            [item, time, random.choice(_NUMBERS)],
            {"item": item, "time": time},
            {"sku": item, "timestamp": time, "channel": random.choice(_TEXTS)},
            _make_value(random, 2),
        )
    )


def _make_body(random: Random, path: str) -> dict[str, Any]:
    """Mostly as it should be."""
    events = [_make_event(random) for _ in range(random.choice((0, 1, 3, 30)))]
    body: dict[str, Any] = {"user": random.choice(("a", "b", "c01", 7))}
    if path == "/events":
        body["events"] = events
    elif random.random() < 0.6:
        body = {"history": events}
    if path == "/score":
        body["candidates"] = [random.choice((*_TEXTS, *range(9))) for _ in range(3)]
    for _ in range(random.choice((0, 0, 1, 2))):
        body[random.choice(_FIELDS)] = _make_value(random, 2)
    return {"requests": [body] * random.choice((1, 2, 99))} if random.random() < 0.1 else body


def _damage(random: Random, body: bytes) -> bytes:
    place = random.randrange(len(body) + 1)
    return body[:place] + random.choice((b"", b"\xff", b",", b"1", b"[")) + body[place + 1 :]
