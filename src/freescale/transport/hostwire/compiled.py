"""Compiles the C files of this package, once per machine and version, with the compiler that is
there. Triton needs one too."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from freescale.folders import list_cache_folders, open_own_folder

FLAGS = ("-O2", "-shared", "-fPIC")
_SECONDS = 60.0
_T = TypeVar("_T")


def compiler() -> str | None:
    return next(
        (
            path
            for name in (os.environ.get("CC"), "cc", "gcc", "clang")
            if name and (path := shutil.which(name))
        ),
        None,
    )


def source(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.c")


def loaded(name: str, load: Callable[[str], _T]) -> tuple[_T | None, str]:
    """What `load` makes of the path of the compiled `name`.c; or None and why. Every folder that it
    may be kept in is tried: one can be full, another user's, or on a mount that nothing is executed
    from."""
    found = compiler()
    if platform.system() != "Linux":
        return None, f"it is for Linux, not {platform.system()}"
    if found is None:
        return None, "no C compiler (cc, gcc, clang or CC)"
    reasons = []
    for folder in list_cache_folders():
        try:
            return _kept(name, open_own_folder(folder), found, load), ""
        except subprocess.CalledProcessError as error:
            reasons.append(
                f"{found} failed: "
                f"{(error.stderr.decode(errors='replace').strip().splitlines() or [str(error)])[0]}"
            )
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            reasons.append(str(error))
    return None, "; ".join(dict.fromkeys(reasons))


def _kept(name: str, folder: Path, found: str, load: Callable[[str], _T]) -> _T:
    """The file's name ends with the digest of its bytes: a damaged one may take the process that
    loads it down."""
    # homes are shared by machines
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    key = hashlib.sha256(
        source(name).read_bytes() + f"{platform.machine()} {libc}".encode()
    ).hexdigest()[:16]
    for made in sorted(folder.glob(f"{name}-{key}-*.so")):
        with suppress(OSError, AttributeError):
            if made.stem.rpartition("-")[2] == _digest(made):
                return load(str(made))
        with suppress(OSError):
            made.unlink()
    return _compile(found, source(name), folder / f"{name}-{key}", load)


def _compile(found: str, code: Path, stem: Path, load: Callable[[str], _T]) -> _T:
    """Several ranks may do it at once: each for itself. Only what can be loaded is kept."""
    handle, name = tempfile.mkstemp(dir=stem.parent, suffix=".so")
    os.close(handle)
    own = Path(name)
    try:
        subprocess.run(
            [found, *FLAGS, "-o", name, str(code)],
            check=True,
            capture_output=True,
            timeout=_SECONDS,
        )
        made = load(name)
        os.replace(own, stem.with_name(f"{stem.name}-{_digest(own)}.so"))
        return made
    finally:
        own.unlink(missing_ok=True)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
