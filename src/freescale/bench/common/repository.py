"""The benchmarks that lie in the repository, under benchmarks/, and the environment with TorchRec
that some need."""

from __future__ import annotations

import subprocess
from pathlib import Path

import freescale

_MEASURED = ("src", "benchmarks/torchrec")


def repository() -> Path:
    """Its root. The package alone, as pip installs it, has no benchmarks."""
    root = Path(freescale.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "torchrec" / "setup.sh").is_file():
        raise ValueError(
            "the benchmarks and their arms lie in the repository, under benchmarks/: "
            "run this from a clone of it"
        )
    return root


def peer_python(root: Path) -> str:
    """The interpreter of .venv-peer, which has TorchRec; made or brought up to date first."""
    print("setting TorchRec up in .venv-peer (the first time takes a minute or two)", flush=True)
    if subprocess.run(
        ["bash", str(root / "benchmarks" / "torchrec" / "setup.sh")], check=False
    ).returncode:
        raise ValueError(
            "TorchRec could not be set up; `freescale bench ladder --short` does without it"
        )
    return str(root / ".venv-peer" / "bin" / "python")


def commit(root: Path) -> str:
    """The commit of a clone; `+` when files under src or benchmarks differ from it. `unknown` where
    there is no history."""
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


def changed(root: Path) -> float:
    """When a file of those that are measured was last written, in seconds since 1970."""
    files = [
        *(root / "src").rglob("*.py"),
        *(root / "benchmarks" / "torchrec").glob("*"),
    ]
    return max((file.stat().st_mtime for file in files), default=0.0)
