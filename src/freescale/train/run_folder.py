"""The folder of a run, which belongs to one run at a time. Rank 0 inspects, claims and writes it;
the other ranks learn the outcome.

The claim is a lock on the file `.lock`, which the kernel releases with the process: a killed run
holds nothing. A default name is claimed by mkdir, which succeeds for only one of two runs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from freescale.file_lock import lock
from freescale.launch.attempts import (
    AUTO,
    STOPPED,
    Ending,
    describe_restart,
    explain_repeated,
    explain_restart,
    find_repeated,
    forget_attempt,
    note_begin,
    note_end,
    read_endings,
    read_restarts,
)
from freescale.stores.runs import find_checkpoints, upload_run
from freescale.train.state.holder_link import RUN_ID, read_run_id

if TYPE_CHECKING:  # imports torch; `new_folder` does not need it
    from freescale.transport.api import Transport

LOCK = ".lock"
# The files of a run other than its checkpoints.
_WRITTEN = (
    *("config.json", "metrics.jsonl", "ledger.jsonl", "ledger.json", "trace.json.gz"),
    *("tensorboard", "vocabulary.parquet", "features", "origin"),
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
    """Copies a file atomically."""
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.copyfile(source, temporary)
    temporary.replace(target)
    return target


class RunFolder:
    """The folder of one run. Creating it and `open` are collectives."""

    def __init__(
        self,
        folder: Path | None,
        resume: bool | str,
        transport: Transport,
        remembers: Callable[[str], bool] = lambda run: False,
    ) -> None:
        """Checks the folder before any long work.

        Args:
            folder: None makes a new one under runs/, named by the time.
            resume: whether to resume the run in the folder; "auto": if it has a checkpoint. A run
                that resumes claims the folder here, a new one in `open`.
            transport: the ranks of the run.
            remembers: (run) -> whether a snapshot of it is in memory, on any machine; a collective.

        Raises:
            ValueError: on all ranks, if another run uses the folder, if it holds a run and `resume`
                is False, or if there is nothing to resume. With "auto", also if the run has failed
                twice in the same way.
        """
        self._folder, self._transport = folder, transport
        self.is_auto = resume == AUTO
        self._named = isinstance(resume, str) and resume not in (AUTO, "last")
        self.resume = bool(resume)  # with "auto", decided by rank 0
        self._lock: IO[str] | None = None
        self._begun = False
        self.is_open = False  # training has begun: the run writes to its folder
        self._endings: list[Ending] = []  # of attempts without a restart in the log
        self.restarts: list[dict[str, Any]] = []  # lines of metrics.jsonl, on rank 0
        self.notes: list[str] = []  # for people
        self.run_id: str | None = None  # a new run has it after `open`
        self._remembered = resume is not False and self._find_snapshots(remembers)
        self.path = self._agree_on(self._inspect)
        self._begun = self.is_auto and self.resume

    def open(
        self,
        config: str,
        vocabulary: Path | None = None,
        write: Callable[[Path], None] | None = None,
    ) -> None:
        """Claims the folder, writes `config` into it and copies the `vocabulary` of the data.
        Called after all checks: a run that never began leaves no folder."""
        self.path = self._agree_on(lambda: self._claim_new(config, vocabulary, write))
        self._begun = True

    def upload(self) -> None:
        """Uploads what has changed, if the folder belongs into a store. A collective."""
        from freescale.transport.failures import run_on_rank_0

        run_on_rank_0(self._transport, lambda: upload_run(self.path))

    def forget_snapshots(self) -> None:
        """Gives a run that resumes from a named checkpoint a new id, so that no machine finds the
        snapshots of the steps that it gives up. A collective."""
        if self._named:
            self._agree_on(lambda: self._name_run(self.path))

    def log_restarts(self, step: int) -> None:
        """Writes to metrics.jsonl, on rank 0, how earlier attempts ended. The run continues after
        `step`."""
        self.is_open = True
        if self._transport.rank != 0:
            return
        fresh = [describe_restart(ending, step, time.time()) for ending in self._endings]
        self.notes += [explain_restart(entry) for entry in fresh]
        # a run without a checkpoint starts over, and so does its log
        known = [] if (self.path / "metrics.jsonl").exists() else self.restarts
        self.restarts = [*self.restarts, *fresh]
        if known or fresh:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in (*known, *fresh))
        self._endings = []
        note_begin(self.path)

    @contextmanager
    def note_failure(self, step: Callable[[], int]) -> Iterator[None]:
        """Records a failure within the block for the next attempt."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self._note(type(error).__name__, str(error)[:2000], step())
            raise

    def note_result(self, stopped: int, step: int) -> None:
        """Records that the run is complete or, with the number of a signal, that it was stopped."""
        if stopped:
            self._note(STOPPED, f"stopped by {signal.Signals(stopped).name}", step)
        elif self._transport.rank == 0:
            forget_attempt(self.path)

    def _note(self, kind: str, message: str, step: int) -> None:
        rank = self._transport.rank
        if self._begun:
            ending = Ending(kind, message, step, time.time(), None if kind == STOPPED else rank)
            note_end(self.path, f"rank-{rank:05d}", ending)

    def close(self) -> None:
        """Releases the folder for other runs."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _find_snapshots(self, remembers: Callable[[str], bool]) -> bool:
        """Whether snapshot holders have snapshots of the run in the folder."""
        found = None
        if self._transport.rank == 0 and self._folder is not None:
            found = read_run_id(self._folder)
        run = self._transport.gather_bytes((found or "").encode())[0].decode()
        return bool(run) and remembers(run)

    # ---- rank 0

    def _inspect(self) -> Path:
        if self._folder is None:
            self.resume = self.resume and not self.is_auto
            return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        if (self._folder / LOCK).exists():
            self._claim(self._folder)
        if self.is_auto:
            self.resume = self._holds_run(self._folder)
        self._refuse(self._folder)
        if self.is_auto or self.resume:  # otherwise a new run replaces the one in the folder
            self._endings = read_endings(self._folder)
            self.restarts = read_restarts(self._folder)
        # not again by itself after two equal failures
        if self.is_auto and (failure := find_repeated(self._folder)):
            raise ValueError(explain_repeated(failure))
        if self.resume:
            self._claim(self._folder)
            self.run_id = read_run_id(self._folder)
            if self.is_auto:  # a mistaken --resume by hand is not an attempt
                note_begin(self._folder, self._endings)
        else:
            self.close()  # until all checks are done
        return self._folder

    def _claim_new(
        self, config: str, vocabulary: Path | None, write: Callable[[Path], None] | None
    ) -> Path:
        path = new_folder(self.path) if self._folder is None else self.path
        path.mkdir(parents=True, exist_ok=True)
        self._claim(path)
        self._refuse(path)
        if not self.resume and (path / "config.json").exists():
            self._move_aside(path)
        note_begin(path, self._endings)
        self.run_id = read_run_id(path) if self.resume else None
        if self.run_id is None:
            self._name_run(path)
        if vocabulary is not None:
            copy_file(vocabulary, path / vocabulary.name)
        if write is not None:
            write(path)
        temporary = path / "config.json.tmp"
        temporary.write_text(config, encoding="utf-8")
        temporary.replace(path / "config.json")
        upload_run(path)
        return path

    def _name_run(self, path: Path) -> Path:
        self.run_id = secrets.token_hex(8)
        (path / RUN_ID).write_text(self.run_id + "\n", encoding="utf-8")
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

    def _holds_run(self, path: Path) -> bool:
        from freescale.train.state.checkpoints import Checkpoints

        if self._remembered and (path / "config.json").exists():
            return True
        return Checkpoints(find_checkpoints(path), self._transport).latest() is not None

    def _refuse(self, path: Path) -> None:
        saved = self._holds_run(path)
        if saved and not self.resume:
            raise ValueError(
                f"{path} already holds a run: name another folder, or pass --resume to continue it"
            )
        if self.resume and not saved:
            raise ValueError(
                f"nothing to resume: {path} holds no checkpoint, because the run ended before its "
                "first one; start it again with the same command, without --resume"
            )

    def _move_aside(self, path: Path) -> None:
        """Moves the files of a run that ended before its first checkpoint to a subfolder."""
        aside = new_folder(path / "ended")
        for name in _WRITTEN:
            if (path / name).exists():
                (path / name).rename(aside / name)
        self.notes.append(
            f"moved an earlier run, which ended before its first checkpoint, to {aside}"
        )

    # ---- all ranks

    def _agree_on(self, look: Callable[[], Path]) -> Path:
        """Runs `look` on rank 0 and returns its folder on all ranks, or raises its error on all."""
        found, problem = "", ""
        if self._transport.rank == 0:
            try:
                found = str(look())
            except (ValueError, OSError) as error:
                self.close()
                problem = str(error)
        message = json.dumps([found, problem, self.resume, self.run_id]).encode()
        agreed = self._transport.gather_bytes(message)[0]
        found, problem, self.resume, self.run_id = json.loads(agreed)
        if problem:
            raise ValueError(problem)
        return Path(found)


def lock_folder(path: Path) -> IO[str] | None:
    """Locks a run's folder until the returned file is closed or the process ends. Returns None on a
    file system without locks. The file stays: if it were removed, two runs could each lock a file.

    Raises:
        ValueError: if another run holds the lock.
    """
    opened = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    with ExitStack() as stack:
        file = stack.enter_context(os.fdopen(opened, "r+", encoding="utf-8"))
        try:
            if not lock(opened, wait=False):
                return None
        except BlockingIOError:
            holder = file.read().strip() or "unknown"
            raise ValueError(
                f"{path} is in use by another run ({holder}): name another folder, or wait until "
                "it has ended"
            ) from None
        stack.pop_all()  # it stays open
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
