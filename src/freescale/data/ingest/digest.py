"""Identifies the content of files by a digest of all bytes, cached while a file is certainly the
same.

Archives and images preserve names, sizes and modification times, but not the kernel's own time of
the last change (ctime): a cached digest is valid if path, inode, size and both times are unchanged
in the same boot. Files are read whole at every start if the file system takes times from elsewhere,
or if a file is so new that another change might get the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

_BLOCK = 1 << 18
_THREADS = 4
_STABLE_S = 2.0  # at least the time resolution of any such file system
_KEPT_S = 30 * 24 * 3600  # cached digests
# file systems that set change times themselves
_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "zfs", "bcachefs"}
_OTHERS = {"tmpfs", "ramfs", "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph"}

Stamp = tuple[int, ...]  # device, inode, size, mtime, ctime


@dataclass(frozen=True)
class Content:
    """A file as it was when it was read."""

    path: Path  # as given
    digest: str
    stamp: Stamp

    def check_unchanged(self) -> None:
        """Raises ValueError if size or times changed: results would not match the digest."""
        if _make_stamp(os.stat(self.path))[2:] != self.stamp[2:]:
            raise _make_changed_error(self.path)


def compute_digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def read_contents(
    paths: Sequence[Path], memory: Path, report: Callable[[float], None]
) -> list[Content]:
    """Digests of files, computed or found in `memory`, a folder that may be shared. `report` is
    called with the share done, if files are read. ValueError for a file that changes meanwhile."""
    sizes = [path.stat().st_size for path in paths]

    def read_on(before: int, read: int) -> None:
        report(min((before + read) / max(sum(sizes), 1), 1.0))

    return [
        _read_content(path, memory, partial(read_on, sum(sizes[:number])))
        for number, path in enumerate(paths)
    ]


def _read_content(path: Path, memory: Path, report: Callable[[int], None]) -> Content:
    with open(path, "rb", buffering=0) as file:
        stamp = _make_stamp(os.fstat(file.fileno()))
        known = _find_known(path, memory)
        if known is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):  # unusable: read the file
                about = json.loads(known.read_text(encoding="utf-8"))
                if tuple(about["stamp"]) == stamp:
                    return Content(path, str(about["digest"]), stamp)
        content = Content(path, _compute_digest(file, report), stamp)
        if _make_stamp(os.fstat(file.fileno())) != stamp:
            raise _make_changed_error(path)
    content.check_unchanged()  # another file may have the name now
    if known is not None and time.time() - stamp[4] / 1e9 > _STABLE_S:
        _remember(known, content)
    return content


def _compute_digest(file: FileIO, report: Callable[[int], None]) -> str:
    """The digest of the block digests, computed by several threads."""
    whole, pending, read = hashlib.blake2b(digest_size=16), deque[Future[bytes]](), 0
    with ThreadPoolExecutor(_THREADS) as threads:
        while block := file.read(_BLOCK):
            pending.append(
                threads.submit(lambda block: hashlib.blake2b(block, digest_size=32).digest(), block)
            )
            read += len(block)
            if len(pending) > _THREADS:
                whole.update(pending.popleft().result())
                report(read)
        for future in pending:
            whole.update(future.result())
    report(read)
    return whole.hexdigest()


def _find_known(path: Path, memory: Path) -> Path | None:
    """Where the digest of `path` is cached; None if times prove nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    resolved = path.resolve()
    if not keeps_own_times(resolved, mounts):
        return None
    return memory / f"{compute_digest(boot, str(resolved))}.json"


def keeps_own_times(path: Path, mounts: str) -> bool:
    """Whether the file system under `path` sets change times itself, by /proc/self/mountinfo."""
    best, answer = -1, False
    for line in mounts.splitlines():
        fields = line.split()
        after = fields.index("-")
        point = Path(fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        # of two at one point the later one is on top
        if path.is_relative_to(point) and len(point.parts) >= best:
            # the file system itself, not this view of it
            written = "ro" not in fields[after + 3].split(",")
            best, answer = len(point.parts), fields[after + 1] in _DISKS | _OTHERS and written
    return answer


def _remember(known: Path, content: Content) -> None:
    """Caches the digest if possible; otherwise the next start reads the file again."""
    with suppress(OSError):
        known.parent.mkdir(parents=True, exist_ok=True)
        for other in known.parent.iterdir():
            if time.time() - other.stat().st_mtime > _KEPT_S:
                other.unlink()
        mine = known.with_suffix(f".{os.getpid()}")
        try:
            mine.write_text(
                json.dumps({"stamp": content.stamp, "digest": content.digest}), encoding="utf-8"
            )
            os.replace(mine, known)
        finally:
            mine.unlink(missing_ok=True)


def _make_stamp(about: os.stat_result) -> Stamp:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _make_changed_error(path: Path) -> ValueError:
    return ValueError(
        f"{path}: the file changed while it was read; start again when it is complete"
    )
