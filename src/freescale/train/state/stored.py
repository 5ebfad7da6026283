"""Checkpoints in an object store, which has no renames and no locks, but conditional writes.

    manifest.json         which steps there are, their folders, and who writes
    step-00000100.w7/     files of a checkpoint that was begun when the manifest was at version 7

A checkpoint exists once the manifest names it. The manifest is replaced only if it is as its writer
left it. So one that was taken over can neither publish nor remove anything, whatever it still does:
its files have names of their own. A writer renews its claim; a claim that is not renewed, or whose
process is gone, may be taken over.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from freescale.stores.path import StorePath, remove_tree
from freescale.train.state.disk import CheckpointFolder
from freescale.transport.machine import identify_machine

RENEWED_S = 8.0  # between two renewals of a claim
_EXPIRES_S = 30.0  # a claim that has not changed for so long

Manifest = dict[str, Any]


def open_folder(folder: Path) -> CheckpointFolder:
    """The folder of a run's checkpoints, on a disk or in a store."""
    return StoredFolder(folder) if isinstance(folder, StorePath) else CheckpointFolder(folder)


class StoredFolder(CheckpointFolder):
    """Whatever changes the folder claims it first, for this object; `close` ends that."""

    def __init__(self, folder: StorePath) -> None:
        super().__init__(folder)
        self._file = StorePath(folder, "manifest.json")
        self._lock = threading.RLock()  # a thread renews the claim
        self._held: tuple[Manifest, str] | None = None  # last written manifest, its version
        self._lost = False
        self._ended: threading.Event | None = None  # event that ends that thread
        self._id = secrets.token_hex(8)
        self._writing: dict[int, str] = {}  # names of folders, by step

    def _read(self) -> Manifest:
        with self._lock:
            return self._held[0] if self._held is not None else self._find()[0]

    def steps(self) -> list[int]:
        return sorted(map(int, self._read()["steps"]))

    def path(self, step: int) -> Path:
        name: str = self._read()["steps"].get(str(step), f"step-{step:08d}")
        return self.folder / name

    # ---- rank 0

    def claim(self) -> None:
        """Makes this the only writer.

        Raises:
            ValueError: another one is at work, or has taken this one's place.
        """
        with self._lock:
            if self._lost:
                raise ValueError(
                    f"{self.folder} has another writer now, which took over while this one did not "
                    "answer: end this run, the other one goes on"
                )
            seen: str | None = None
            until = time.monotonic() + _EXPIRES_S
            while self._held is None:
                manifest, version = self._find()
                writer = manifest["writer"]
                free = writer is None or _is_gone(writer)
                if not free and seen not in (None, version):
                    raise ValueError(
                        f"{self.folder} is in use by another run (process {writer['process']} on "
                        f"{writer['host']}): name another folder, or wait until it has ended"
                    )
                if free or time.monotonic() > until:
                    own = {"writer": {"id": self._id, **_describe_writer()}}
                    self._write(manifest | own, version)
                else:
                    seen = version
                    time.sleep(1)
            if self._ended is None:
                self._ended = threading.Event()
                given = weakref.ref(self), self._ended
                threading.Thread(target=_renew, args=given, daemon=True).start()

    def _find(self) -> tuple[Manifest, str | None]:
        found = self._file.read_version()
        empty: Manifest = {"version": 0, "writer": None, "steps": {}}
        return (empty, None) if found is None else (json.loads(found[0]), found[1])

    def _write(self, manifest: Manifest, version: str | None) -> bool:
        manifest = manifest | {"version": manifest["version"] + 1}
        written = self._file.write_if(json.dumps(manifest, indent=1).encode(), version)
        self._held = None if written is None else (manifest, written)
        return written is not None

    def _change(self, change: Callable[[Manifest], Manifest]) -> None:
        with self._lock:
            self.claim()
            assert self._held is not None
            manifest, version = self._held
            while not self._write(manifest | change(manifest), version):
                manifest, found = self._find()
                if found is None or (manifest["writer"] or {}).get("id") != self._id:
                    self._lost = True
                    self.claim()  # raises
                version = str(found)  # written before an error that hid it

    def renew(self) -> bool:
        """Whether this is still the writer, as far as is known."""
        with self._lock, suppress(OSError, ValueError):
            if self._held is not None:
                self._change(lambda manifest: {})
        return self._held is not None

    def close(self) -> None:
        with self._lock, suppress(OSError, ValueError):
            if self._ended is not None:
                self._ended.set()
                self._ended = None
            if self._held is not None:
                self._change(lambda manifest: {"writer": None})
                self._held = None

    def begin(self, step: int) -> str:
        self.clear()
        assert self._held is not None
        self._writing[step] = f"step-{step:08d}.w{self._held[0]['version']}"
        return self._writing[step]

    def finish(self, step: int) -> None:
        """Publishes a written checkpoint, also in place of one of the same step."""
        name = self._writing.pop(step)
        before = self._read()["steps"].get(str(step))
        self._change(lambda manifest: {"steps": manifest["steps"] | {str(step): name}})
        if before is not None:
            remove_tree(self.folder / before)

    def give_up_after(self, step: int) -> None:
        """From then on nothing finds the checkpoints after `step`."""
        if later := [found for found in self.steps() if found > step]:
            self._forget(later)

    def remove(self, steps: Iterable[int]) -> None:
        if gone := list(steps):
            paths = [self.path(step) for step in gone]
            self._forget(gone)
            for path in paths:
                remove_tree(path)

    def _forget(self, steps: Iterable[int]) -> None:
        self.claim()
        gone = set(map(str, steps))
        left = {step: name for step, name in self._read()["steps"].items() if step not in gone}
        self._change(lambda manifest: {"steps": left})

    def clear(self) -> None:
        """Removes what no manifest names: given up, or left by writers that ended."""
        self.claim()
        manifest = self._read()
        for path in self.folder.glob("step-*.w*"):
            # not those of a writer that has taken over and that this one has not noticed
            earlier = int(path.name.rpartition(".w")[2]) <= manifest["version"]
            if earlier and path.name not in manifest["steps"].values():
                remove_tree(path)

    remove_given_up = clear


def _renew(of: weakref.ref[StoredFolder], ended: threading.Event) -> None:
    while not ended.wait(RENEWED_S):
        folder = of()
        if folder is None or not folder.renew():
            return
        del folder


def _describe_writer() -> Manifest:
    machine = f"{identify_machine().decode()} {os.readlink('/proc/self/ns/pid')}"
    return {"process": os.getpid(), "host": socket.gethostname(), "machine": machine}


def _is_gone(writer: Manifest) -> bool:
    """Whether it was a process of this machine that has ended."""
    same: bool = writer["machine"] == _describe_writer()["machine"]
    return same and not Path(f"/proc/{writer['process']}").exists()
