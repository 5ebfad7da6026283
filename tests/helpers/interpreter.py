"""Runs a file of kernel cases through Triton's interpreter, in a process of its own: Triton reads
its variable when imported. Once for all of a run's test processes: the cases take a while, and
tests of one file may run in several of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.file_lock import lock

QUICK = str(Path(__file__).with_name("quick_interpreter.py"))


def interpreted(file: str, *arguments: str) -> dict:
    """What the cases printed. Triton exists for Linux alone; there it is installed with the tests'
    requirements."""
    if importlib.util.find_spec("triton") is None:
        assert sys.platform != "linux", "triton is missing: install the dev requirements"
        pytest.skip("triton exists for Linux alone")
    with open(shared_file(file, *arguments), "a+") as shared:
        lock(shared.fileno())  # another process may be at it
        shared.seek(0)
        known = shared.read()
        if not known:
            known = _interpret(file, arguments)
            shared.write(known)
    return json.loads(known)


def shared_file(file: str, *arguments: str) -> Path:
    return Path(os.environ["FREESCALE_TESTS_SHARED"]) / "-".join([Path(file).stem, *arguments])


def _interpret(file: str, arguments: tuple[str, ...]) -> str:
    tests = str(Path(__file__).parents[1])  # the cases import other helpers
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), tests]))
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, QUICK, file, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
