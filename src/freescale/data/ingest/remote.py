"""Files behind URLs (s3://, gs://, https://, memory://), copied into the cache through fsspec.

A copy is kept until the file behind the URL changes (by its ETag, or size and time), so that ranks
and later runs do not fetch it again.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from freescale.data.ingest.digest import compute_digest
from freescale.data.workspace import explain_full_disk, workspace
from freescale.folders import find_cache_folder
from freescale.stores.calls import connect


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
