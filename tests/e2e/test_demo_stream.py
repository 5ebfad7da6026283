"""`freescale demo stream`: events come, are trained and served, and the page has the figures."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from urllib.request import urlopen

from helpers.command import Begun, wait_for


def test_events_are_trained_and_served_while_they_come(tmp_path):
    folder = tmp_path / "demo"
    given = ["--seconds", 3000, "--rate", 100, "--window", "2s", "--port", 0, "--folder", folder]
    with Begun("demo", "stream", *given) as process:
        wait_for(lambda: "watch it" in process.read_output() or not process.runs())
        address = re.search(r"http://127\.0\.0\.1:\d+", process.read_output())[0]

        def read() -> dict:
            assert process.runs(), process.ended().stderr
            return json.loads((folder / "figures.json").read_text())

        wait_for((folder / "figures.json").exists)
        wait_for(lambda: read().get("health", {}).get("version", {}).get("number", 0) >= 1)
        figures = read()
        assert figures["sent"] > 100 and figures["history_ms"] > 0 and figures["model_age"] > 0
        assert figures["health"]["status"] == "ok"
        with urlopen(address) as page:
            assert "A model that is still training" in page.read().decode()
        with urlopen(f"{address}/run/metrics.jsonl") as log:
            lines = [json.loads(line) for line in log.read().splitlines()]
        assert sum("stream" in line for line in lines) >= 2
        os.kill(process.pid, 2)  # as Ctrl-C: the trainer and the server end with it
        result = process.ended()
    assert result.returncode == 130, result.stderr
    assert "stopped" in (folder / "train.log").read_text()


def test_a_demo_that_is_killed_leaves_no_process(tmp_path):
    folder = tmp_path / "demo"
    with Begun("demo", "stream", "--port", 0, "--folder", folder, "--seconds", 3000) as process:
        wait_for(lambda: process.ranks() or not process.runs())
        (trainer,) = process.ranks()
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: has_ended(trainer))


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
