"""The repository around the package: where results are kept, and which commit is measured."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import freescale
import freescale_bench

_MEASURED = ("src", "benchmarks/freescale_bench", "benchmarks/peers/torchrec", "tests/faults")


def find_repository() -> Path | None:
    """The root of the clone that this package is part of; None for a package that pip
    installed."""
    root = Path(freescale_bench.__file__).resolve().parents[2]
    return root if (root / "benchmarks" / "peers" / "torchrec").is_dir() else None


def require_repository() -> Path:
    """As `find_repository`, for what exists in a clone only: the documents and their results.

    Raises:
        ValueError: there is none.
    """
    root = find_repository()
    if root is None:
        raise ValueError(
            "the documents, their results and the storms of faults lie in the repository: "
            "`pip install -e ./benchmarks` in a clone"
        )
    return root


def find_commit(root: Path | None = None) -> str:
    """The commit of the clone at `root`, by default of this one; `+` when files that are measured
    differ from it. `unknown` where there is no history."""
    root = root or find_repository()
    if root is None:
        return "unknown"
    try:
        head, changed = (
            subprocess.run(
                ["git", *words], cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", *_MEASURED],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def find_last_change(root: Path) -> float:
    """When a file of those that are measured was last written, in seconds since 1970."""
    files = [
        file
        for folder in _MEASURED
        for file in (root / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    return max((file.stat().st_mtime for file in files), default=0.0)


def package_path() -> str:
    """PYTHONPATH of a process that runs both packages, installed or not."""
    packages = (freescale.__file__, freescale_bench.__file__)
    folders = dict.fromkeys(str(Path(str(file)).resolve().parents[1]) for file in packages)
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
