"""The folder of a run, which belongs to one run at a time. Rank 0 inspects, claims and writes it;
the other ranks learn the outcome.

The claim is a lock on the folder's file `.lock`, which the kernel releases with the process: a
killed run holds nothing. A default name is claimed by mkdir, which succeeds for one of two runs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

from freescale.file_lock import lock

if TYPE_CHECKING:  # imports torch, which `new_folder` does not need
    from freescale.transport.api import Transport

LOCK = ".lock"
# What a run writes besides its checkpoints.
_WRITTEN = (
    "config.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "ledger.json",
    "trace.json.gz",
    "tensorboard",
    "vocabulary.parquet",
)


def new_folder(wanted: Path) -> Path:
    """Makes the folder `wanted`, or wanted-2, wanted-3, ... if it exists. No two callers get the
    same one."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("counting has no end")


def copy_file(source: Path, target: Path) -> Path:
    """Copies a file; `target` is whole whenever it is there."""
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.copyfile(source, temporary)
    temporary.replace(target)
    return target


class RunFolder:
    """The folder of one run. Making one, and `open`, are collectives."""

    def __init__(self, folder: Path | None, resume: bool, transport: Transport) -> None:
        """Refuses what can be refused before anything long is done.

        Args:
            folder: None makes a new one under runs/, with the time in its name.
            resume: whether the run goes on with what the folder holds. Such a run claims the
                folder here, a new one in `open`.
            transport: the ranks of the run.

        Raises:
            ValueError: on all ranks, if another run uses the folder, if it holds a run and `resume`
                is False, or if there is nothing to resume.
        """
        self._folder, self._resume, self._transport = folder, resume, transport
        self._lock: IO[str] | None = None
        self.notes: list[str] = []  # for the person who looks at the run
        self.path = self._agree_on(self._inspect)

    def open(self, config: str, vocabulary: Path | None = None) -> None:
        """Claims the folder, writes `config` into it and copies the `vocabulary` of the data.
        Called once nothing can be refused any more, so that a run that never began leaves no
        folder."""
        self.path = self._agree_on(lambda: self._claim_new(config, vocabulary))

    def close(self) -> None:
        """Releases the folder for other runs."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- rank 0

    def _inspect(self) -> Path:
        if self._folder is None:
            return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        if (self._folder / LOCK).exists():
            self._claim(self._folder)
        self._refuse(self._folder)
        if self._resume:
            self._claim(self._folder)
        else:
            self.close()  # until nothing can be refused any more
        return self._folder

    def _claim_new(self, config: str, vocabulary: Path | None) -> Path:
        path = new_folder(self.path) if self._folder is None else self.path
        path.mkdir(parents=True, exist_ok=True)
        self._claim(path)
        self._refuse(path)
        if not self._resume and (path / "config.json").exists():
            self._move_aside(path)
        if vocabulary is not None:
            copy_file(vocabulary, path / vocabulary.name)
        temporary = path / "config.json.tmp"
        temporary.write_text(config, encoding="utf-8")
        temporary.replace(path / "config.json")
        return path

    def _claim(self, path: Path) -> None:
        if self._lock is not None:
            return
        self._lock = lock_folder(path)
        if self._lock is None:
            self.notes = [
                f"{path} cannot be locked, because its file system has no locks: make sure that no "
                "other run uses it"
            ]

    def _refuse(self, path: Path) -> None:
        from freescale.train.checkpoint import Checkpoints

        saved = Checkpoints(path / "checkpoints", self._transport).latest() is not None
        if saved and not self._resume:
            raise ValueError(
                f"{path} already holds a run: name another folder, or pass --resume to continue it"
            )
        if self._resume and not saved:
            raise ValueError(
                f"nothing to resume: {path} holds no checkpoint, because the run ended before its "
                "first one; start it again with the same command, without --resume"
            )

    def _move_aside(self, path: Path) -> None:
        """Moves what is left of a run that ended before its first checkpoint out of the way."""
        aside = new_folder(path / "ended")
        for name in _WRITTEN:
            if (path / name).exists():
                (path / name).rename(aside / name)
        self.notes.append(
            f"moved an earlier run, which ended before its first checkpoint, to {aside}"
        )

    # ---- all ranks

    def _agree_on(self, look: Callable[[], Path]) -> Path:
        """The folder that `look` returns on rank 0; its error is raised on all ranks."""
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


def lock_folder(path: Path) -> IO[str] | None:
    """Locks a run's folder until the returned file is closed or the process ends.

    The file stays: if it were removed, two runs could each lock one of their own.

    Returns:
        The lock's file, or None on a file system that has no locks.

    Raises:
        ValueError: if another run holds the lock.
    """
    file = os.fdopen(os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8")
    try:
        acquired = lock(file.fileno(), wait=False)
    except BlockingIOError:
        holder = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"{path} is in use by another run ({holder}): name another folder, or wait until "
            "it has ended"
        ) from None
    except OSError:
        file.close()
        raise
    if not acquired:
        file.close()
        return None
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
