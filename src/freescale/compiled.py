"""Compiles C sources once per machine and version with the installed compiler."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from freescale.folders import list_cache_folders, open_own_folder

FLAGS = ("-O2", "-shared", "-fPIC")
_SECONDS = 60.0  # timeout of the compiler
_T = TypeVar("_T")


def find_compiler() -> str | None:
    """The path of the C compiler: $CC, or the first of cc, gcc and clang."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


def declare(function: Any, result: Any, *arguments: Any) -> Any:
    """Tells ctypes the types of a function."""
    function.restype, function.argtypes = result, arguments
    return function


def compile_and_load(
    source: Path, load: Callable[[str], _T], flags: Sequence[str] = FLAGS
) -> tuple[_T | None, str]:
    """Loads the compiled `source` from the cache; compiles it first if needed.

    Every cache folder is tried: one can be full, another user's, or mounted noexec. `source`
    includes other files of its folder. `load` takes the path of the library and raises OSError or
    AttributeError for one that this machine cannot use.

    Returns (what `load` returned, ""), or (None, the reason).
    """
    compiler = find_compiler()
    if platform.system() != "Linux":
        return None, f"it is for Linux, not {platform.system()}"
    if compiler is None:
        return None, "no C compiler (cc, gcc, clang or CC)"
    reasons = []
    for folder in list_cache_folders():
        try:
            return _load_cached(source, open_own_folder(folder), compiler, load, flags), ""
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
            reasons.append(f"{compiler} failed: {lines[0]}")
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            reasons.append(str(error))
    return None, "; ".join(dict.fromkeys(reasons))


def _load_cached(
    source: Path, folder: Path, compiler: str, load: Callable[[str], _T], flags: Sequence[str]
) -> _T:
    """Loads from the cache. File names end with a digest: loading a damaged file may crash."""
    stem = f"{source.stem}-{_hash_sources(source.parent, flags)}"
    for library in sorted(folder.glob(f"{stem}-*.so")):
        with suppress(OSError, AttributeError):
            if library.stem.rpartition("-")[2] == _hash_file(library):
                return load(str(library))
        with suppress(OSError):
            library.unlink()
    return _compile(compiler, source, folder / stem, load, flags)


def _compile(
    compiler: str, source: Path, stem: Path, load: Callable[[str], _T], flags: Sequence[str]
) -> _T:
    """Compiles and loads; safe with several ranks at once. Keeps only what can be loaded."""
    handle, name = tempfile.mkstemp(dir=stem.parent, suffix=".so")
    os.close(handle)
    library = Path(name)
    try:
        subprocess.run(
            [compiler, *flags, "-o", name, str(source), "-lm"],
            check=True,
            capture_output=True,
            timeout=_SECONDS,
        )
        loaded = load(name)
        os.replace(library, stem.with_name(f"{stem.name}-{_hash_file(library)}.so"))
        return loaded
    finally:
        library.unlink(missing_ok=True)


def _hash_sources(folder: Path, flags: Sequence[str]) -> str:
    """A digest of sources, flags and machine: several may share a home."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    processor = _describe_processor() if "-march=native" in flags else ""
    described = f"{platform.machine()} {libc} {processor} {' '.join(flags)}"
    digest = hashlib.sha256(described.encode())
    for file in sorted(folder.glob("*.[ch]")):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _describe_processor() -> str:
    """The machine's instruction set, as the kernel lists it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
