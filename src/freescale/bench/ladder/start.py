"""`freescale bench ladder`: starts the repository's ladder, with TorchRec beside it in an
environment of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from freescale.bench.common.repository import peer_python, repository


def run_ladder(arguments: Sequence[str], peer: bool) -> int:
    """`peer`: with TorchRec's arms, whose environment is made first. Its exit status."""
    root = repository()
    python = peer_python(root) if peer else sys.executable
    return subprocess.run(
        [python, "-m", "freescale.bench.ladder.bench", *arguments], check=False
    ).returncode


def run_gpu_ladder(ranks: int) -> int:
    """With TorchRec's arms if this environment has it: its CUDA kernels fit one version of torch
    each."""
    return subprocess.run(
        [sys.executable, "-m", "freescale.bench.ladder.gpu", "--nproc", str(ranks)], check=False
    ).returncode
