"""A run's folder belongs to one run at a time. Rank 0 looks, claims and writes; the other ranks
hear what it found.

The claim is a lock on the folder's file `.lock`, which the kernel ends with the process, however
that ends: a killed run holds nothing. A default name is made by mkdir, which of two runs lets one
have it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:  # torch, which who only wants a new folder can do without
    from freescale.transport.api import Transport

LOCK = ".lock"
# what file systems without locks say
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
# What a run writes besides its checkpoints.
_WRITTEN = (
    "config.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "ledger.json",
    "trace.json.gz",
    "tensorboard",
)


def new_folder(wanted: Path) -> Path:
    """Makes it, or wanted-2, wanted-3, ... if there is one: no two callers get the same."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("counting has no end")


class RunFolder:
    """Every rank makes one; that, and `open`, are collectives."""

    def __init__(self, asked: Path | None, resume: bool, transport: Transport) -> None:
        """`asked` None: a new one under runs/, with the time in its name. Refuses what can be
        refused before anything long is done. A run that goes on is claimed here, a new one in
        `open`."""
        self._asked, self._resume, self._transport = asked, resume, transport
        self._lock: IO[str] | None = None
        self.notes: list[str] = []  # for the person who looks at the run
        self.path = self._agreed(self._looked_at)

    def open(self, config: str) -> None:
        """Once nothing can be refused any more: a run that never began leaves no folder."""
        self.path = self._agreed(lambda: self._opened(config))

    def close(self) -> None:
        """Another run may have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- rank 0

    def _looked_at(self) -> Path:
        if self._asked is None:
            return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        if (self._asked / LOCK).exists():
            self._claim(self._asked)
        self._refuse(self._asked)
        if self._resume:
            self._claim(self._asked)
        else:
            self.close()  # until nothing can be refused any more
        return self._asked

    def _opened(self, config: str) -> Path:
        path = new_folder(self.path) if self._asked is None else self.path
        path.mkdir(parents=True, exist_ok=True)
        self._claim(path)
        self._refuse(path)
        if not self._resume and (path / "config.json").exists():
            self._put_aside(path)
        temporary = path / "config.json.tmp"
        temporary.write_text(config, encoding="utf-8")
        temporary.replace(path / "config.json")
        return path

    def _claim(self, path: Path) -> None:
        if self._lock is not None:
            return
        try:
            self._lock = locked(path)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.notes = [
                (f"{path} cannot be locked ({error.strerror}): see to it that no other run uses it")
            ]

    def _refuse(self, path: Path) -> None:
        from freescale.train.checkpoint import Checkpoints

        saved = Checkpoints(path / "checkpoints", self._transport).latest() is not None
        if saved and not self._resume:
            raise ValueError(
                f"{path} already holds a run: name another folder, or pass --resume "
                "to go on with it"
            )
        if self._resume and not saved:
            raise ValueError(
                f"nothing to resume: {path} holds no checkpoint, the run ended before its first "
                "one; start it again with the same "
                "command, without --resume"
            )

    def _put_aside(self, path: Path) -> None:
        """What is left of a run that ended before its first checkpoint."""
        aside = new_folder(path / "ended")
        for name in _WRITTEN:
            if (path / name).exists():
                (path / name).rename(aside / name)
        self.notes.append(f"a run that ended here before its first checkpoint is now in {aside}")

    # ---- all ranks

    def _agreed(self, look: Callable[[], Path]) -> Path:
        """What rank 0 found, or its error."""
        found, problem = "", ""
        if self._transport.rank == 0:
            try:
                found = str(look())
            except (ValueError, OSError) as error:
                self.close()
                problem = str(error)
        found, problem = json.loads(
            self._transport.gather_bytes(json.dumps([found, problem]).encode())[0]
        )
        if problem:
            raise ValueError(problem)
        return Path(found)


def locked(path: Path) -> IO[str]:
    """The folder's lock, until the file is closed or the process ends. The file stays: to remove it
    would let two runs lock two."""
    file = os.fdopen(os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"{path} is in use by another run ({holder}): name another folder, or "
            "wait until that has ended"
        ) from None
    except OSError:
        file.close()
        raise
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
