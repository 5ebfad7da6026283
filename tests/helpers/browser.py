"""Chromium without a window, for tests: the WebDriver protocol of chromedriver, spoken directly
(Debian: chromium-driver).

Who has no browser sets FREESCALE_NO_BROWSER=1, and the tests are skipped; without that variable a
missing browser is a failure.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# the protocol's name for a reference to an element
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    def __init__(self, port: int, width: int, height: int, dark: bool, profile: Path) -> None:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        phone = width < 500  # without a phone's emulation a window cannot be that narrow
        options: dict[str, Any] = {
            "args": [*flags, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
            "mobileEmulation": {
                "deviceMetrics": {
                    "width": width,
                    "height": height,
                    "pixelRatio": 1,
                    "touch": phone,
                    "mobile": phone,
                }
            },
        }
        if dark:
            options["args"].append("--blink-settings=preferredColorScheme=0")
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self._base = f"http://127.0.0.1:{port}"
        self._base += (
            "/session/"
            + self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        )

    def _ask(self, method: str, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from error

    def open(self, path: Path) -> None:
        self.open_address(path.absolute().as_uri())

    def open_address(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})
        self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of a function's body in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def settle(self) -> None:
        """Until what was asked for has been drawn."""
        done = (
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() "
            "=> done(true)));"
        )
        self._ask("POST", "/execute/async", {"script": done, "args": []})

    def find(self, selector: str) -> dict:
        return self._ask("POST", "/element", {"using": "css selector", "value": selector})

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self.find(selector)[_ELEMENT]}/click", {})
        self.settle()

    def keys(self, selector: str, text: str) -> None:
        self._ask("POST", f"/element/{self.find(selector)[_ELEMENT]}/value", {"text": text})
        self.settle()

    def mouse(self, x: float, y: float) -> None:
        self._pointers("mouse", [[_moved(x, y)]])

    def drag(self, *paths: Sequence[tuple[float, float]], kind: str = "mouse") -> None:
        """From the first point of a path to the last; several paths are several fingers at once.
        One point is a tap."""
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        self._pointers(
            kind,
            [
                [_moved(*path[0]), down, *(_moved(*point) for point in path[1:]), up]
                for path in paths
            ],
        )

    def _pointers(self, kind: str, actions: list[list[dict]]) -> None:
        about = {"type": "pointer", "parameters": {"pointerType": kind}}
        sources = [
            {**about, "id": f"{kind} {number}", "actions": steps}
            for number, steps in enumerate(actions)
        ]
        self._ask("POST", "/actions", {"actions": sources})
        self.settle()

    def wheel(self, x: float, y: float, delta: int) -> None:
        action = {
            "type": "scroll",
            "x": int(x),
            "y": int(y),
            "deltaX": 0,
            "deltaY": delta,
            "duration": 0,
            "origin": "viewport",
        }
        self._ask(
            "POST", "/actions", {"actions": [{"type": "wheel", "id": "wheel", "actions": [action]}]}
        )
        self.settle()

    def log(self) -> list[str]:
        """What the console has said since the last call."""
        return [
            f"{entry['level']}: {entry['message']}"
            for entry in self._ask("POST", "/se/log", {"type": "browser"})
        ]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self) -> None:
        self._ask("DELETE", "")


def _moved(x: float, y: float) -> dict:
    return {"type": "pointerMove", "x": int(x), "y": int(y), "duration": 20, "origin": "viewport"}


def _start_driver(program: str, tries: int = 5) -> tuple[subprocess.Popen, int]:
    """A driver and its port. It takes a free port of one family of addresses and leaves if
    another process holds that number of the other family, so beside other tests it may take
    more than one try."""
    said = ""
    for _ in range(tries):
        driver = subprocess.Popen(
            [program, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                return driver, int(found[1])
            said += line
        said += f"(left with {driver.wait()})\n"
    raise AssertionError(f"chromedriver did not start in {tries} tries:\n{said}")


@contextmanager
def browser(
    profile: Path, width: int = 1280, height: int = 900, dark: bool = False
) -> Iterator[Browser]:
    if os.environ.get("FREESCALE_NO_BROWSER"):
        pytest.skip("FREESCALE_NO_BROWSER is set: there is no browser")
    program = shutil.which("chromedriver")
    assert program, (
        "chromedriver is missing: apt-get install chromium chromium-driver, or set "
        "FREESCALE_NO_BROWSER=1"
    )
    driver, port = _start_driver(program)
    try:
        made = Browser(port, width, height, dark, profile)
        try:
            yield made
        finally:
            made.close()
    finally:
        driver.kill()
        driver.wait()
