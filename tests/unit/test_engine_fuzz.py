"""The engine under AddressSanitizer and UndefinedBehaviorSanitizer: random exchanges between ranks,
and peers that say anything."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.compiled import FLAGS
from freescale.transport.hostwire.bindings import SOURCE

SANITIZERS = [
    "-g",
    "-O1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]
FUZZ = Path(__file__).parents[1] / "helpers" / "engine_fuzz.py"


@pytest.mark.skipif(platform.system() != "Linux", reason="the engine is for Linux")
def test_random_exchanges_and_hostile_peers_under_sanitizers(tmp_path):
    compiler = shutil.which("gcc")
    assert compiler, "gcc brings the sanitizers: apt-get install gcc libc6-dev"
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert os.path.isabs(runtime), (
        "gcc has no libasan.so: apt-get install libgcc-12-dev, or that of its version"
    )
    library = tmp_path / "engine.so"
    flags = [flag for flag in FLAGS if flag != "-O2"]
    subprocess.run(
        [compiler, *flags, *SANITIZERS, "-o", str(library), str(SOURCE)],
        check=True,
        timeout=60,
    )
    told = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(FUZZ), str(library), "1"],
        env=told,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == "well\n", done.stderr[-4000:]
