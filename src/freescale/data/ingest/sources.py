"""Finds the files that a user names: a file, a member of a zip archive, a folder, a pattern or a
URL."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.data.histories import is_histories, list_parts
from freescale.data.ingest.digest import compute_digest
from freescale.data.ingest.yambda import EVENTS, is_yambda
from freescale.data.workspace import explain_full_disk, workspace
from freescale.folders import find_cache_folder
from freescale.stores.calls import connect
from freescale.stores.path import as_path, is_store

PARQUET = (".parquet", ".pq")
TEXT = (".csv", ".tsv", ".txt", ".inter", ".json", ".jsonl", ".ndjson", ".dat", ".data")


@dataclass(frozen=True)
class SourceFile:
    """A file of events on this machine. As text it is what the user calls it."""

    path: Path
    shown: str
    member: str | None = None  # in a zip archive

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        """In lower case, without the suffix of compression."""
        return Path(self.member or self.path.name).name.lower().removesuffix(".gz")

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def is_parquet(self) -> bool:
        return self.name.endswith(PARQUET)


def find_files(
    source: str | Path | Sequence[str | Path], cache: Path | None = None
) -> list[SourceFile]:
    """Finds the files of a source, in the order in which they are read.

    Args:
        source: A path, a pattern (`logs/*.csv`), a folder, a URL, or several of these. A member of
            a zip archive is named like a file in a folder: `archive.zip/ratings.csv`.
        cache: The folder to which files behind URLs are copied.

    Raises:
        ValueError: There is no such file, all of them are empty, or a folder or archive leaves a
            choice.
    """
    given = [source] if isinstance(source, str | Path) else list(source)
    if not given:
        raise ValueError("no interaction file given: name at least one")
    found: list[SourceFile] = []
    for one in given:
        if is_store(one):
            found += _find_stored(as_path(one)) or _find_remote(str(as_path(one)), cache)
        elif "://" in str(one):
            found += _find_remote(str(one), cache)
        else:
            found += _find_local(Path(one))
    if all(file.size == 0 for file in found):
        raise ValueError(f"{found[0]}: the file is empty (0 bytes); give a file with events")
    return found


def _make_source(path: Path, shown: str, member: str = "") -> SourceFile:
    """A single file; of an archive, the `member`, or its only one."""
    if path.suffix.lower() != ".zip":
        return SourceFile(path, shown)
    members = _list_members(path, shown)
    listed = ", ".join(members)[:200]
    if member and member not in members:
        raise ValueError(f"{shown}: the archive has no {member}; it holds {listed}")
    if not members:
        raise ValueError(f"{shown}: the archive has no files; give one with events")
    if not member and len(members) != 1:
        raise ValueError(
            f"{shown}: the archive holds {len(members)} files ({listed}); name one: "
            f"{shown}/{members[0]}"
        )
    member = member or members[0]
    if member.lower().endswith(PARQUET):
        raise ValueError(f"{shown}/{member}: Parquet is not read from archives; unpack {shown}")
    return SourceFile(path, f"{shown}/{member}", member)


def _list_members(path: Path, shown: str) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{shown}: a broken zip file ({error}); fetch it again") from error
    return [name for name in names if not name.endswith("/") and not _is_hidden(Path(name))]


def _find_stored(path: Path) -> list[SourceFile]:
    """Histories in an object store, which are read there. Empty if it has something else."""
    if not is_store(path) or any(sign in str(path) for sign in "*?["):
        return []
    parts = list_parts(path) if path.suffix.lower() not in PARQUET else [path]
    if not parts or not parts[0].is_file() or not is_histories(parts[0]):
        return []
    return [SourceFile(part, str(part)) for part in parts]


def _find_remote(url: str, cache: Path | None) -> list[SourceFile]:
    archive, inside, member = url.partition(".zip/")
    copies = fetch_files(f"{archive}.zip" if inside else url, cache)
    return [_make_source(*copy, member) for copy in copies]


def _find_local(path: Path) -> list[SourceFile]:
    if path.is_file():
        return [_make_source(path, str(path))]
    if path.is_dir():
        return [_make_source(file, str(file)) for file in _list_folder(path)]
    if glob.has_magic(str(path)):
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        files = [_make_source(match, str(match)) for match in matches if match.is_file()]
        if not files:
            raise ValueError(f"{path}: no file fits the pattern; look at the folder with ls")
        return files
    for parent in path.parents:
        if parent.is_file() and parent.suffix.lower() == ".zip":
            return [_make_source(parent, str(parent), path.relative_to(parent).as_posix())]
    raise ValueError(f"{path}: no such file; give the path of an interaction file")


def _list_folder(folder: Path) -> list[Path]:
    """All Parquet files under a folder, or else its text files, which must be of one kind. Of
    Yambda's folder, the events."""
    if is_yambda(folder):
        return [folder / EVENTS]
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not _is_hidden(path.relative_to(folder))
    )
    if parquet := [path for path in files if path.suffix.lower() in PARQUET]:
        return parquet
    texts: dict[str, list[Path]] = {}
    for path in files:
        suffix = Path(path.name.lower().removesuffix(".gz")).suffix
        if suffix in TEXT:
            texts.setdefault(suffix, []).append(path)
    if len(texts) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in files)[:200] or "nothing"
        raise ValueError(
            f"{folder}: the folder has no Parquet files and {len(texts)} kinds of text files "
            f"({names}); name a file, or a pattern in quotes: '{folder}/*.csv'"
        )
    return next(iter(texts.values()))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def fetch_files(url: str, cache: Path | None) -> list[tuple[Path, str]]:
    """Copies the files of a URL or its pattern into the cache. Returns each copy with its URL.

    Raises ValueError if there is no such file, it cannot be reached, or a package is missing.
    """
    system: Any = connect(url.partition("://")[0], url)
    path = system._strip_protocol(url)
    folder = (cache or find_cache_folder()) / "remote"
    try:
        paths = _list_paths(system, path, url)
        urls = [(found, str(system.unstrip_protocol(found))) for found in paths]
        return [(_fetch(system, found, shown, folder), shown) for found, shown in urls]
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"{url}: cannot be read ({error}); check the path and access") from error


def _list_paths(system: Any, path: str, url: str) -> list[str]:
    if any(sign in path for sign in "*?["):
        found = sorted(system.glob(path))
    elif system.isdir(path):
        found = sorted(name for name in system.find(path) if name.endswith((".parquet", ".pq")))
    else:
        found = [path] if system.exists(path) else []
    if not found:
        raise ValueError(f"{url}: no such file; name a file, a pattern, or a folder of Parquet")
    return found


def _fetch(system: Any, path: str, shown: str, folder: Path) -> Path:
    about = system.info(path)
    version = [str(about.get(key)) for key in ("size", "ETag", "etag", "LastModified", "created")]
    name = compute_digest(shown, str(system.ukey(path)), version)
    target = folder / name / Path(path).name
    if not target.is_file():
        with explain_full_disk(folder, f"fetching {shown}", "make room, or name another --cache"):
            folder.mkdir(parents=True, exist_ok=True)
            with workspace(folder, name) as work:
                with system.open(path, "rb") as source, open(work / "copy", "wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                target.parent.mkdir(exist_ok=True)
                os.replace(work / "copy", target)
    return target
