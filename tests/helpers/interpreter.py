"""Runs a file of kernel cases through Triton's interpreter, in a process of its own: Triton reads
its variable when imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(file: str, *arguments: str) -> dict:
    """What the cases printed. Triton exists for Linux alone; there it is installed with the tests'
    requirements."""
    if importlib.util.find_spec("triton") is None:
        assert sys.platform != "linux", "triton is missing: install the dev requirements"
        pytest.skip("triton exists for Linux alone")
    tests = str(Path(__file__).parents[1])  # the cases import other helpers
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), tests]))
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, file, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
