"""Where a user's files are kept between runs: prepared histories, the compiled engine."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_folders() -> list[Path]:
    """In order of preference: the user's cache, and one beside temporary files, for who has no
    home. They need not exist."""
    found = []
    if given := os.environ.get("XDG_CACHE_HOME"):
        found.append(Path(given))
    else:
        # no HOME, and a user that the machine does not know: a container's
        with suppress(RuntimeError):
            found.append(Path.home() / ".cache")
    return [
        *(folder / "freescale" for folder in found),
        Path(tempfile.gettempdir()) / f"freescale-{os.getuid()}",
    ]


def cache_folder() -> Path:
    """The first of them that can be written to."""
    reasons = []
    for folder in cache_folders():
        try:
            return opened(folder)
        except OSError as error:
            reasons.append(str(error))
    raise ValueError(
        f"no folder for prepared histories: {'; '.join(reasons)}. Name one: --cache FOLDER"
    )


def opened(folder: Path) -> Path:
    """Made if need be. OSError unless it is this user's own: what lies in somebody else's may be
    anything."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder} belongs to somebody else, or others may write to it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")
    return folder
