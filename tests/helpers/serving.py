"""`freescale serve` as a process, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.command import Begun, wait_for


class Serving:
    def __init__(self, process: Begun, port: int) -> None:
        self.process, self.port = process, port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
        except BaseException:
            self._connection.close()  # the next request opens another
            raise
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, answer.read()

    def get(self, path: str, **headers: str) -> Any:
        status, found = self.send("GET", path, **headers)
        assert status == 200, found
        return json.loads(found) if "json" in self.headers["content-type"] else found.decode()

    def post(self, path: str, **body: Any) -> Any:
        status, found = self.send("POST", path, json.dumps(body).encode())
        assert status == 200, found
        return json.loads(found)

    def refuse(self, path: str, body: Any, status: int = 400) -> dict[str, str]:
        """What is wrong with a body, as bytes or a value."""
        given = body if isinstance(body, bytes) else json.dumps(body).encode()
        found, answer = self.send("POST", path, given)
        assert found == status, answer
        error = json.loads(answer)["error"]
        assert set(error) == {"field", "message", "fix"} and all(error.values()), error
        return error

    def measure(self, name: str) -> float:
        """A figure of /metrics."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return float(found[1])

    def terminate(self) -> Any:
        os.kill(self.process.pid, signal.SIGTERM)
        return self.process.ended()


@contextmanager
def serving(folder: Path, *options: object, **environment: str) -> Iterator[Serving]:
    with Begun("serve", folder, "--port", 0, "--device", "cpu", *options, **environment) as process:
        wait_for(lambda: "serving" in process.read_output() or not process.runs())
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.read_output())
        assert found, process.ended().stderr
        yield Serving(process, int(found[1]))
