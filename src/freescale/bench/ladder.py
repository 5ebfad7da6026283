"""`freescale bench ladder`: starts the repository's ladder, with TorchRec beside it in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import freescale


def run_ladder(arguments: Sequence[str], peer: bool) -> int:
    """`peer`: with TorchRec's arms, whose environment is made first. Its exit status."""
    root = Path(freescale.__file__).resolve().parents[2]
    script = root / "benchmarks" / "bench_ladder.py"
    if not script.is_file():
        raise ValueError("the ladder compares arms that lie in the repository, under benchmarks/: run it from a clone of it")
    python = sys.executable
    if peer:
        print("setting TorchRec up in .venv-peer (the first time takes a minute or two)", flush=True)
        made = subprocess.run(["bash", str(root / "benchmarks" / "peer" / "setup.sh")], check=False)
        if made.returncode:
            raise ValueError("TorchRec could not be set up; `freescale bench ladder --short` does without it")
        python = str(root / ".venv-peer" / "bin" / "python")
    return subprocess.run([python, str(script), *arguments], check=False).returncode
