"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from freescale.config import ServeConfig
from freescale.embedding.host_tables.tiers import parse_bytes
from freescale.recommend.serve.batching import Batcher
from freescale.recommend.serve.bodies import Refused, read_body
from freescale.recommend.serve.queries import Query
from freescale.recommend.serve.schema import describe_api, make_schemas, render_docs
from freescale.recommend.serve.versions import Follower, Version

_TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_GAUGES = {
    "queue_length": "Requests that wait or are being answered",
    "users": "Users whose events are kept",
    "user_bytes": "Memory of these events",
    "users_dropped": "Users who were dropped for others",
}
FOLLOWED = {
    "version": "Number of the delta that is served",
    "version_step": "Step of the run that it is of",
    "version_published_seconds": "When it was published, since 1970",
    "swaps": "Versions that have come since the server began",
    "apply_seconds": "Time to apply the deltas of the last version",
    "build_seconds": "Time from then until its vectors and its index were ready",
    "delta_alarm": "1: a delta is damaged or missing, and an older version is served",
}


class Metrics:
    """`follows`: with the figures of `FOLLOWED`."""

    def __init__(self, follows: bool = False) -> None:
        self._to = to = CollectorRegistry()
        time = "Time from the head of a request to its answer, without those of status 503"
        self.requests = Counter("freescale_requests", "Requests", ("path", "status"), registry=to)
        self.seconds = Histogram(
            "freescale_request_seconds", time, ("path",), buckets=_TIMES, registry=to
        )
        self.batches = Histogram(
            "freescale_batch_size", "Requests of a batch", buckets=_SIZES, registry=to
        )
        self.rejected = Counter("freescale_rejected", "Requests without room", registry=to)
        gauges = _GAUGES | (FOLLOWED if follows else {})
        self._gauges = [Gauge(f"freescale_{name}", gauges[name], registry=to) for name in gauges]

    def render(self, *gauges: float) -> bytes:
        """`gauges` in the order of `_GAUGES` and `FOLLOWED`."""
        for gauge, value in zip(self._gauges, gauges, strict=True):
            gauge.set(value)
        return generate_latest(self._to)


_SMALL = 1 << 16  # bytes of a body that is read on the event loop
_PATIENCE = 10.0  # seconds for a body to arrive
_MOST_ARRIVING = 256  # bodies at a time
_SUGGESTIONS = 20
_OPEN = {"/healthz", "/", "/docs", "/openapi.json"}  # without a token: nothing of the data


class Server:
    """Answers requests, each with one version of a model. `follower`: brings later ones."""

    def __init__(
        self, version: Version, config: ServeConfig, follower: Follower | None = None
    ) -> None:
        self._config, self._metrics = config, Metrics(follower is not None)
        self._version, self._follower = version, follower
        self._swapping, self._closed = Lock(), False
        self._most_bytes = parse_bytes(config.max_body)
        self._schemas = make_schemas(config)
        self._thread, self._in_thread, self._arriving = ThreadPoolExecutor(1, "reader"), 0, 0
        self.batcher = Batcher(_compute, config, self._metrics.batches.observe)
        page = files("freescale.recommend").joinpath("static", "serve.html").read_text("utf-8")
        about = json.dumps(version.reader.describe_events()).replace("<", "\\u003c")
        show: dict[str, Callable[[Request], Any]] = {
            "/": _make_page(HTMLResponse(page.replace("/* model */ null", about))),
            "/docs": _make_page(HTMLResponse(render_docs(self._schemas))),
            "/openapi.json": _make_page(JSONResponse(describe_api(self._schemas))),
            "/healthz": self._show_health,
            "/metrics": self._show_metrics,
            "/items": self._list,
            "/users": self._list,
        }
        post = {"/recommend": self._answer, "/score": self._answer, "/events": self._append}
        routes = [Route(path, endpoint) for path, endpoint in show.items()]
        routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()]
        self._paths = {*show, *post}
        handlers = dict.fromkeys((Refused, HTTPException, Exception), _show_error)
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    def close(self) -> None:
        self.batcher.close()
        self._thread.shutdown()
        with self._swapping:
            self._closed = True
            self._version.release()

    def swap(self, version: Version) -> None:
        """From now on requests see another version; those that are being read or answered, theirs.
        On any thread."""
        with self._swapping:
            if not self._closed:
                version, self._version = self._version, version
        version.release()

    @contextmanager
    def _use_version(self) -> Iterator[Version]:
        while not (version := self._version).acquire():
            pass  # swapped in between
        try:
            yield version
        finally:
            version.release()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.perf_counter(), 0

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        refused = self._find_refusal(scope)
        try:
            if refused is None:
                await self._app(scope, receive, note)
            else:  # before the body is read
                await _make_response(refused)(scope, receive, note)
        finally:
            self._note_request(scope, status, time.perf_counter() - begin)

    def _find_refusal(self, scope: Scope) -> Refused | None:
        path, token = scope["path"], self._config.token
        if token is not None and path not in _OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + token.encode()):
                fix = "send the header Authorization: Bearer TOKEN"
                return Refused("authorization", "the token is missing or wrong", fix, 401)
        room = self.batcher.has_room() and self._arriving < _MOST_ARRIVING
        return None if room or path not in self._schemas else self._reject()

    def _reject(self) -> Refused:
        self._metrics.rejected.inc()
        return Refused("queue", "the queue is full", "try again in a second", 503)

    def _note_request(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, status).inc()
        if status != 503:
            self._metrics.seconds.labels(path).observe(seconds)
        if self._config.access_log:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "client": (scope.get("client") or [""])[0],
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(1e3 * seconds, 2),
            }
            sys.stderr.write(json.dumps(line) + "\n")

    async def _answer(self, request: Request) -> Response:
        body, path = await self._receive(request), request.scope["path"]
        large = len(body) > _SMALL
        ones, places = await self._read(partial(read_body, body, self._schemas[path]), large)
        with self._use_version() as version:
            reader = version.reader
            read = partial(reader.read_query, path)
            queries = await self._read(
                lambda: [read(one, place) for one, place in zip(ones, places)],
                large or reader.must_load(ones),
            )
            if not self.batcher.has_room(len(queries)):  # others came while the body arrived
                raise self._reject()
            found = await self.batcher.answer([(version, query) for query in queries])
            answers = [reader.answer(query, one) for query, one in zip(queries, found)]
        return JSONResponse({"results": answers} if places[0] else answers[0])

    async def _append(self, request: Request) -> Response:
        body = await self._receive(request)
        large, schema = len(body) > _SMALL, self._schemas["/events"]
        (one,), _ = await self._read(partial(read_body, body, schema), large)
        with self._use_version() as version:
            slow = large or version.reader.must_load([one])
            return JSONResponse(await self._read(partial(version.reader.append, one), slow))

    async def _read(self, read: Callable[[], Any], slow: bool) -> Any:
        """Reads on the event loop, or, if it is slow, on a thread."""
        if not slow:
            return read()
        if self._in_thread >= self._config.queue:
            raise self._reject()
        self._in_thread += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        finally:
            self._in_thread -= 1

    async def _receive(self, request: Request) -> bytes:
        most, body = self._most_bytes, bytearray()
        large = Refused("body", f"the body is larger than {most:,} bytes", "send less", 413)
        size = request.headers.get("content-length", "0")
        if not size.isdecimal() or len(size) > 18 or int(size) > most:
            raise large
        self._arriving += 1
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    message = await request.receive()
                    body += message.get("body", b"")
                    if message["type"] == "http.disconnect":
                        raise Refused("body", "the body ends early", "send all of it")
                    if len(body) > most:
                        raise large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise Refused("body", "the body is late", "send it at once", 408) from None
        finally:
            self._arriving -= 1

    async def _list(self, request: Request) -> Response:
        kind, text = request.scope["path"][1:], request.query_params.get("q", "")[:100]
        reader = self._version.reader
        find = reader.find_items if kind == "items" else reader.find_users
        return JSONResponse({kind: await self._read(lambda: find(text, _SUGGESTIONS), True)})

    async def _show_metrics(self, request: Request) -> Response:
        cache, follower = self._version.reader.cache, self._follower
        found: list[float] = [self.batcher.length, len(cache), cache.nbytes, cache.dropped]
        if follower is not None:
            found += [self._version.about[name] for name in ("number", "step", "published")]
            found += [follower.swaps, *follower.seconds.values(), follower.alarm is not None]
        figures = self._metrics.render(*found)
        return Response(figures, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_health(self, request: Request) -> Response:
        found: dict[str, Any] = {"status": "ok"}
        if self._follower is not None:  # an older version is no reason to send nobody here
            alarm = self._follower.alarm
            found = {"status": "ok" if alarm is None else "stale", "alarm": alarm}
            found |= {"version": self._version.about, "seconds": self._follower.seconds}
        return JSONResponse(found)


def _compute(jobs: Sequence[tuple[Version, Query]]) -> list[Any]:
    """Answers queries of some versions, each with its own."""
    found: list[Any] = [None] * len(jobs)
    for version in dict.fromkeys(version for version, _ in jobs):
        places = [place for place, (one, _) in enumerate(jobs) if one is version]
        answers = version.compute([jobs[place][1] for place in places])
        for place, answer in zip(places, answers, strict=True):
            found[place] = answer
    return found


def _make_page(response: Response) -> Callable[[Request], Any]:
    async def show(request: Request) -> Response:
        return response

    return show


def _make_response(refused: Refused) -> Response:
    return JSONResponse(refused.content, refused.status, refused.headers)


async def _show_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        refused = Refused("path", error.detail, "see /docs", error.status_code)
    elif isinstance(error, Refused):
        refused = error
    else:
        refused = Refused("server", "the server failed", "its log has the reason", 500)
    return _make_response(refused)
