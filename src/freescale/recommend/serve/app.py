"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freescale.recommend.recommender import Recommender
from freescale.recommend.serve.batching import Batcher
from freescale.recommend.serve.bodies import Refused, parse_body, split_body
from freescale.recommend.serve.metrics import Metrics
from freescale.recommend.serve.queries import Query, Reader, compute
from freescale.recommend.serve.schema import Limits, describe_api, make_schemas, render_docs

_SMALL = 1 << 16  # bytes of a body that is read on the event loop
_PATIENCE = 10.0  # seconds for a body to arrive
_MOST_READING = 256  # bodies that arrive at a time
_SUGGESTIONS = 20
_OPEN = {"/healthz", "/", "/docs", "/openapi.json"}  # without a token: nothing of the model


class Server:
    """Answers requests to one model.

    Args:
        recommender: the model.
        limits: of what is accepted and kept.
        token: that requests must have; None: none.
        access_log: whether each request is a line of stderr.
    """

    def __init__(
        self,
        recommender: Recommender,
        limits: Limits | None = None,
        token: str | None = None,
        access_log: bool = True,
    ) -> None:
        self.limits, self.metrics = limits or Limits(), Metrics()
        self._token, self._access_log, self._reading = token, access_log, 0
        self._reader = Reader(recommender, self.limits)
        self._schemas = make_schemas(self.limits)
        self._thread = ThreadPoolExecutor(1, "reader")
        self._in_thread = 0
        self.batcher = Batcher(
            partial(compute, recommender), self.limits, self.metrics.batches.observe
        )
        page = files("freescale.recommend").joinpath("static", "serve.html").read_text("utf-8")
        about = json.dumps(self._reader.describe_events()).replace("<", "\\u003c")
        page = page.replace("/* model */ null", about)
        docs, api = render_docs(self._schemas), describe_api(self._schemas)
        pages: Mapping[str, Callable[[Request], Response]] = {
            "/": lambda request: HTMLResponse(page),
            "/docs": lambda request: HTMLResponse(docs),
            "/openapi.json": lambda request: JSONResponse(api),
            "/healthz": lambda request: JSONResponse({"status": "ok"}),
            "/metrics": self._show_metrics,
        }
        answers = {"/recommend": self._answer, "/score": self._answer, "/events": self._append}
        lists = {"/items": self._list_items, "/users": self._list_users}
        self._paths = {*pages, *answers, *lists}
        app = Starlette(
            routes=[
                *(Route(path, _make_async(page)) for path, page in pages.items()),
                *(Route(path, answer, methods=["POST"]) for path, answer in answers.items()),
                *(Route(path, show) for path, show in lists.items()),
            ],
            exception_handlers={
                Refused: _show_refused, HTTPException: _show_refused, Exception: _show_refused
            },
        )  # fmt: skip
        self._app: ASGIApp = app

    def close(self) -> None:
        self.batcher.close()
        self._thread.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin, status = time.perf_counter(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refused = self._find_refusal(scope)
        try:
            if refused is not None:  # before the body is read
                await JSONResponse(refused.content, refused.status, refused.headers)(
                    scope, receive, note
                )
            else:
                await self._app(scope, receive, note)
        finally:
            self._note_request(scope, status, time.perf_counter() - begin)

    def _find_refusal(self, scope: Scope) -> Refused | None:
        path = scope["path"]
        if self._token is not None and path not in _OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token.encode()):
                fix = "send the header Authorization: Bearer TOKEN"
                return Refused("authorization", "the token is missing or wrong", fix, 401)
        if scope["method"] != "POST" or path not in self._schemas:
            return None
        if not self.batcher.has_room() or self._reading >= _MOST_READING:
            return self._reject()
        return None

    def _reject(self) -> Refused:
        self.metrics.rejected.inc()
        return Refused("queue", "the queue is full", "try again in a second", 503)

    def _note_request(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self.metrics.requests.labels(path, status).inc()
        if status != 503:
            self.metrics.seconds.labels(path).observe(seconds)
        if self._access_log:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(1e3 * seconds, 2),
            }
            sys.stderr.write(json.dumps(line) + "\n")

    async def _answer(self, request: Request) -> Response:
        body, path = await self._read_body(request), request.url.path
        parse = partial(self._parse, path, body)
        parsed, places = await self._read(parse, len(body) > _SMALL)
        if not self.batcher.has_room(len(parsed)):
            raise self._reject()
        slow = len(body) > _SMALL or self._reader.must_load(parsed)
        queries = await self._read(partial(self._read_queries, path, parsed, places), slow)
        if not self.batcher.has_room(len(queries)):
            raise self._reject()
        found = await self.batcher.answer(queries)
        answers = [self._reader.answer(query, one) for query, one in zip(queries, found)]
        return JSONResponse({"results": answers} if places[0] else answers[0])

    def _parse(self, path: str, body: bytes) -> tuple[list[dict[str, Any]], list[str]]:
        return split_body(parse_body(body), self._schemas[path])

    def _read_queries(self, path: str, parsed: Any, places: list[str]) -> list[Query]:
        return [self._reader.read_query(path, one, place) for one, place in zip(parsed, places)]

    async def _append(self, request: Request) -> Response:
        body = await self._read_body(request)
        (one,), _ = await self._read(partial(self._parse, "/events", body), len(body) > _SMALL)
        slow = len(body) > _SMALL or self._reader.must_load([one])
        return JSONResponse(await self._read(partial(self._reader.append, one), slow))

    async def _read(self, read: Callable[[], Any], slow: bool) -> Any:
        """Reads on the event loop, or, if it is slow, on a thread."""
        if not slow:
            return read()
        if self._in_thread >= self.limits.queue:
            raise self._reject()
        self._in_thread += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        finally:
            self._in_thread -= 1

    async def _read_body(self, request: Request) -> bytes:
        most = self.limits.body
        refused = Refused("body", f"the body is larger than {most:,} bytes", "send less", 413)
        given = request.headers.get("content-length", "")
        if given.isdecimal() and (len(given) > 18 or int(given) > most):
            raise refused
        parts: list[bytes] = []
        size, self._reading = 0, self._reading + 1
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise Refused("body", "the body ends early", "send all of it")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise refused
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            message = f"the body did not arrive in {_PATIENCE:g} s"
            raise Refused("body", message, "send it faster", 408) from None
        finally:
            self._reading -= 1

    async def _list_items(self, request: Request) -> Response:
        def read() -> Any:
            rows = self._reader.find_items(text, _SUGGESTIONS)
            found = zip(self._reader.restore(rows), self._reader.describe(rows))
            return [{"id": id, "attributes": about} for id, about in found]

        text = request.query_params.get("q", "")[:100]
        return JSONResponse({"items": await self._read(read, True)})

    async def _list_users(self, request: Request) -> Response:
        text = request.query_params.get("q", "")[:100]
        read = partial(self._reader.find_users, text, _SUGGESTIONS)
        return JSONResponse({"users": await self._read(read, True)})

    def _show_metrics(self, request: Request) -> Response:
        cache = self._reader.cache
        figures = {
            "queue_length": self.batcher.length,
            "users": len(cache),
            "user_bytes": cache.nbytes,
            "users_dropped": cache.dropped,
        }
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.render(**figures), media_type=kind)


def _make_async(show: Callable[[Request], Response]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return show(request)

    return answer


async def _show_refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        return JSONResponse(error.content, error.status, error.headers)
    if isinstance(error, HTTPException):
        about = Refused("path", error.detail, "see /docs", error.status_code)
        return JSONResponse(about.content, error.status_code, error.headers)
    about = Refused("server", "the server failed", "its log has the reason", 500)
    return JSONResponse(about.content, 500)
