"""Folders to work in. What a killed process leaves, a later one clears; what a full disk ends says
so."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from freescale.file_lock import lock

# locked by the process that works in the folder; says in which boot of which machine
MARK = "freescale-work.lock"
_FORGOTTEN_S = 24 * 3600
_UNMARKED = re.compile(r"\.[0-9a-f]{16}-[a-z0-9_]{8}")  # folders of versions before the mark
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


@contextmanager
def workspace(parent: Path, name: str) -> Iterator[Path]:
    """A new folder in `parent`, gone at the end."""
    clear(parent)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name}-"))
    try:
        mark = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # first locked, then signed: who finds the signature and no lock knows that the maker is
            # dead
            if lock(mark):
                os.write(mark, _boot())
            yield folder
        finally:
            os.close(mark)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear(parent: Path) -> None:
    """Removes the folders of makers that are dead. An attempt: `parent` may not be there, or not be
    ours to write."""
    try:
        hidden = [
            Path(entry.path)
            for entry in os.scandir(parent)
            if entry.name[0] == "." and entry.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return
    for folder in hidden:
        if _dead(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _dead(folder: Path) -> bool:
    """Of this boot of this machine the lock says it. Other machines' locks may not be seen here, so
    their folders must also have lain untouched for a day: nobody works for so long without
    writing."""
    try:
        mark = os.open(folder / MARK, os.O_RDWR)
    except FileNotFoundError:
        return bool(_UNMARKED.fullmatch(folder.name)) and _untouched(folder)
    except OSError:
        return False
    try:
        if not lock(mark, wait=False):
            return _untouched(folder)
        return os.read(mark, 100) == _boot() != b"" or _untouched(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(mark)


def _untouched(folder: Path) -> bool:
    try:
        newest = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # somebody is at it
        return False
    return time.time() - newest > _FORGOTTEN_S


def _boot() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


@contextmanager
def full_disk_named(
    folder: Path, work: str, mend: str, needed: Callable[[], float | None] = lambda: None
) -> Iterator[None]:
    """Around a workspace: a full disk is one line that says so, with the bytes that the work needs
    where they are known."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        amount = needed()
        needs = f"; it needs up to {_size(amount)}" if amount else ""
        known = error.errno == errno.ENOSPC and folder.exists()
        free = f"; {_size(shutil.disk_usage(folder).free)} are free now" if known else ""
        full = OSError(f"{folder}: {_FULL[error.errno]} while {work}{needs}{free}; {mend}")
        full.errno = error.errno
        raise full from error


def _size(amount: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"
