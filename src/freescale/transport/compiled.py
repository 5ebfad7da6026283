"""Compiles the C files of this package, once per machine and version, with the compiler that is there. Triton needs one too."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_FLAGS = ("-O2", "-shared", "-fPIC")
_SECONDS = 60.0


def compiler() -> str | None:
    return next((path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)


@cache
def library(name: str) -> Path | None:
    """The compiled `name`.c; None where it cannot be."""
    source = Path(__file__).with_name(f"{name}.c")
    found = compiler()
    if found is None or not source.exists() or platform.system() != "Linux":
        return None
    key = hashlib.sha256(source.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    for folder in _folders():
        made = folder / f"{name}-{key}.so"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():  # what lies there may be anything
                continue
            if not made.exists():
                _compile(found, source, made)
            return made
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _folders() -> list[Path]:
    """Where it may be kept: in the user's cache, or where there is none."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return [Path(base) / "freescale", Path(tempfile.gettempdir()) / f"freescale-{os.getuid()}"]


def _compile(found: str, source: Path, made: Path) -> None:
    """Several ranks may do it at once: each for itself, and the last one's stays."""
    handle, own = tempfile.mkstemp(dir=made.parent, suffix=".so")
    os.close(handle)
    try:
        subprocess.run([found, *_FLAGS, "-o", own, str(source)], check=True, capture_output=True, timeout=_SECONDS)
        os.replace(own, made)
    finally:
        Path(own).unlink(missing_ok=True)
