"""The folders in which files are kept between runs: prepared histories, the compiled engine."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def list_cache_folders() -> list[Path]:
    """Candidates in order: the user's cache, then a temporary folder for users without a home. They
    need not exist."""
    found = []
    if given := os.environ.get("XDG_CACHE_HOME"):
        found.append(Path(given))
    else:
        # in a container there may be no HOME, and no entry for the user
        with suppress(RuntimeError):
            found.append(Path.home() / ".cache")
    return [
        *(folder / "freescale" for folder in found),
        Path(tempfile.gettempdir()) / f"freescale-{os.getuid()}",
    ]


def find_cache_folder() -> Path:
    """The first writable candidate. ValueError says why there is none."""
    reasons = []
    for folder in list_cache_folders():
        try:
            return open_own_folder(folder)
        except OSError as error:
            reasons.append(str(error))
    raise ValueError(
        f"no folder for prepared histories: {'; '.join(reasons)}. Name one: --cache FOLDER"
    )


def open_own_folder(folder: Path) -> Path:
    """Makes the folder if it does not exist, and returns it.

    Raises:
        OSError: unless it belongs to this user alone; the files in another's could be anything.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")
    return folder
