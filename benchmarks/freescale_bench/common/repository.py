"""The repository around the package: the folder of results, and the measured commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import freescale
import freescale_bench

_MEASURED = ("src", "benchmarks/freescale_bench", "benchmarks/peers/torchrec", "tests/faults")


def find_repository() -> Path | None:
    """Returns the root of the clone that contains this package; None if pip copied the package
    elsewhere."""
    root = Path(freescale_bench.__file__).resolve().parents[2]
    return root if (root / "benchmarks" / "peers" / "torchrec").is_dir() else None


def require_repository() -> Path:
    """Like `find_repository`, for parts that exist only in a clone: documents and results.

    Raises:
        ValueError: there is no clone.
    """
    root = find_repository()
    if root is None:
        raise ValueError(
            "the documents, results and fault storms are only in the repository: "
            "`pip install -e ./benchmarks` in a clone"
        )
    return root


def find_commit(root: Path | None = None) -> str:
    """Returns the commit of the clone at `root` (default: this one), followed by `+` if measured
    files differ from it; `unknown` without history."""
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
    """Returns when a measured file was last written, in seconds since 1970."""
    files = [
        file
        for folder in _MEASURED
        for file in (root / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    return max((file.stat().st_mtime for file in files), default=0.0)


def package_path() -> str:
    """Returns a PYTHONPATH that has both packages, installed or not."""
    packages = (freescale.__file__, freescale_bench.__file__)
    folders = dict.fromkeys(str(Path(str(file)).resolve().parents[1]) for file in packages)
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
