"""Compiles the C sources of this package, once per machine and version, with the compiler that is
installed. Triton needs one too."""

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
SOURCES = Path(__file__).with_name("csrc")
_SECONDS = 60.0  # that the compiler may take
_T = TypeVar("_T")


def find_compiler() -> str | None:
    """The path of the C compiler: $CC, or the first of cc, gcc and clang."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


def compile_and_load(name: str, load: Callable[[str], _T]) -> tuple[_T | None, str]:
    """Loads the compiled csrc/`name`.c from the cache, and compiles it first where it is not there.

    Every folder that it may be kept in is tried: one can be full, another user's, or on a mount
    that nothing is executed from.

    Args:
        name: of the file that is compiled; it includes the others.
        load: takes the path of the library; its OSError or AttributeError makes the library one
            that this machine cannot use.

    Returns:
        (what `load` returned, ""), or (None, the reason).
    """
    compiler = find_compiler()
    if platform.system() != "Linux":
        return None, f"it is for Linux, not {platform.system()}"
    if compiler is None:
        return None, "no C compiler (cc, gcc, clang or CC)"
    reasons = []
    for folder in list_cache_folders():
        try:
            return _load_cached(name, open_own_folder(folder), compiler, load), ""
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
            reasons.append(f"{compiler} failed: {lines[0]}")
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            reasons.append(str(error))
    return None, "; ".join(dict.fromkeys(reasons))


def _load_cached(name: str, folder: Path, compiler: str, load: Callable[[str], _T]) -> _T:
    """The file's name ends with the digest of its bytes: a damaged one may take the process that
    loads it down."""
    stem = f"{name}-{_hash_sources()}"
    for library in sorted(folder.glob(f"{stem}-*.so")):
        with suppress(OSError, AttributeError):
            if library.stem.rpartition("-")[2] == _hash_file(library):
                return load(str(library))
        with suppress(OSError):
            library.unlink()
    return _compile(compiler, SOURCES / f"{name}.c", folder / stem, load)


def _compile(compiler: str, source: Path, stem: Path, load: Callable[[str], _T]) -> _T:
    """Several ranks may do it at once: each for itself. Only what can be loaded is kept."""
    handle, name = tempfile.mkstemp(dir=stem.parent, suffix=".so")
    os.close(handle)
    library = Path(name)
    try:
        subprocess.run(
            [compiler, *FLAGS, "-o", name, str(source)],
            check=True,
            capture_output=True,
            timeout=_SECONDS,
        )
        loaded = load(name)
        os.replace(library, stem.with_name(f"{stem.name}-{_hash_file(library)}.so"))
        return loaded
    finally:
        library.unlink(missing_ok=True)


def _hash_sources() -> str:
    """Of every file that is compiled, and of the machine: several may share a home."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    digest = hashlib.sha256(f"{platform.machine()} {libc}".encode())
    for file in sorted(SOURCES.glob("*.[ch]")):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
