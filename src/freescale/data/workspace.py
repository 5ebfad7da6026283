"""Folders for work on data, temporary ones and those of the cache. A later process removes what a
killed one left; a full disk is reported as such."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from freescale.file_lock import lock

Progress = Callable[[str, float], None]  # a stage, the share done

# locked by the process that works in the folder; contains the machine's boot id
MARK = "freescale-work.lock"
_FORGOTTEN_S = 24 * 3600
_UNMARKED = re.compile(r"\.[0-9a-f]{16}-[a-z0-9_]{8}")  # folders of versions before the mark
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


@contextmanager
def workspace(parent: Path, name: str) -> Iterator[Path]:
    """Makes a new folder in `parent` and removes it at the end."""
    remove_dead_workspaces(parent)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name}-"))
    try:
        mark = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # First lock, then sign: a signature without a lock means that the maker is dead.
            if lock(mark):
                os.write(mark, _read_boot_id())
            yield folder
        finally:
            os.close(mark)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_dead_workspaces(parent: Path) -> None:
    """Removes the folders whose makers are dead, as far as `parent` exists and is writable."""
    try:
        hidden = [
            Path(entry.path)
            for entry in os.scandir(parent)
            if entry.name[0] == "." and entry.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return
    for folder in hidden:
        if _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    """Whether the process that made the folder is gone.

    In the same boot of the same machine the lock proves it. Locks of other machines may be
    invisible here, so their folders must also be untouched for a day.
    """
    try:
        mark = os.open(folder / MARK, os.O_RDWR)
    except FileNotFoundError:
        return bool(_UNMARKED.fullmatch(folder.name)) and _is_untouched(folder)
    except OSError:
        return False
    try:
        if not lock(mark, wait=False):
            return _is_untouched(folder)
        return os.read(mark, 100) == _read_boot_id() != b"" or _is_untouched(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(mark)


def _is_untouched(folder: Path) -> bool:
    try:
        newest = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:  # in use
        return False
    return time.time() - newest > _FORGOTTEN_S


def _read_boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


@contextmanager
def explain_full_disk(
    folder: Path, work: str, fix: str, needed: Callable[[], float | None] = lambda: None
) -> Iterator[None]:
    """Turns the error of a full disk into one line with the cause and the fix.

    Args:
        folder: On the disk.
        work: What was going on, for the message.
        fix: The fix, for the message.
        needed: Returns the bytes that the work needs, if known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        amount = needed()
        needs = f"; it needs up to {_format_bytes(amount)}" if amount else ""
        known = error.errno == errno.ENOSPC and folder.exists()
        free = f"; {_format_bytes(shutil.disk_usage(folder).free)} are free now" if known else ""
        full = OSError(f"{folder}: {_FULL[error.errno]} while {work}{needs}{free}; {fix}")
        full.errno = error.errno
        raise full from error


def _format_bytes(amount: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def make_folder(cache: Path, name: str, work: str, write: Callable[[Path], None]) -> Path:
    """A folder of the cache, which one process of a machine makes by `write`, or finds."""
    target, fix = cache / name, "make room, or name a cache folder on another disk"
    if not target.is_dir():
        with explain_full_disk(cache, f"preparing {work}", fix):
            cache.mkdir(parents=True, exist_ok=True)
            with lock_cache(cache), workspace(cache, name) as folder:
                if not target.is_dir():
                    made = folder / "made"
                    made.mkdir()
                    write(made)
                    os.replace(made, target)
    return target


@contextmanager
def lock_cache(cache: Path) -> Iterator[None]:
    """Admits one process at a time, since the ranks of a machine all ask for the same file. The
    lock ends with its holder.

    NFS locks files but no folders. Where nothing can be locked, every rank makes the file, and the
    last one stays.
    """
    with ExitStack() as stack:
        for path, flags in ((cache, os.O_RDONLY), (cache / "lock", os.O_RDWR | os.O_CREAT)):
            try:
                descriptor = os.open(path, flags, 0o666)
            except PermissionError:  # another user's
                continue
            stack.callback(os.close, descriptor)
            if lock(descriptor):
                break
        yield
