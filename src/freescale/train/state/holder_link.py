"""How ranks start and reach the snapshot holder of their machine, and how a launcher ends it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from freescale.train.state import holder

PATIENCE = 600.0  # seconds that a holder stays after all ranks of its machine have left
RUN_ID = ".run-id"  # file in a run's folder with the name of its snapshots
_SECONDS = 30.0  # limit for an answer


def is_supported() -> bool:
    """Whether this system has memory files and abstract sockets: Linux."""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create")


def read_run_id(folder: Path) -> str | None:
    """The name under which the run in `folder` keeps snapshots; None before it has begun."""
    with suppress(OSError):
        return (folder / RUN_ID).read_text(encoding="utf-8").strip() or None
    return None


def name_holder(run: str, machine: bytes) -> str:
    """The socket of a run's holder on a machine, or network namespace."""
    return f"freescale-holder-{run}-{hashlib.sha256(machine).hexdigest()[:12]}"


class HolderLink:
    """A connection to a holder, which stays as long as it has one. Used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @staticmethod
    def connect(name: str) -> HolderLink | None:
        """None if there is no holder of that name."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_SECONDS)
        try:
            connection.connect(f"\0{name}")
        except OSError:
            connection.close()
            return None
        if not holder.read_peer(connection)[1]:
            connection.close()
            return None
        return HolderLink(connection)

    @staticmethod
    def start(name: str, patience: float = PATIENCE) -> HolderLink:
        """Connects to the holder, and starts it if there is none. OSError if that fails."""
        found = HolderLink.connect(name)
        if found is not None:
            return found
        path = str(Path(holder.__file__))
        # A session of its own: signals to the ranks' group and terminal do not reach it.
        process = subprocess.Popen(
            [sys.executable, "-I", path, name, str(patience)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        assert process.stdout is not None
        process.stdout.readline()  # it listens, another one does, or it has failed
        process.stdout.close()
        # Reaps it when it ends.
        threading.Thread(target=process.wait, name="freescale holder", daemon=True).start()
        found = HolderLink.connect(name)
        if found is None:
            raise OSError(f"the snapshot holder ({sys.executable} {path}) did not start")
        return found

    @property
    def process(self) -> int:
        """The holder's process id: its memory ends with it."""
        return holder.read_peer(self._connection)[0]

    def put(self, name: str, file: int) -> None:
        """Hands a memory file over; the caller's own descriptor stays open."""
        self._ask({"do": "put", "name": name}, [file])

    def get(self, name: str) -> int | None:
        """A descriptor of a memory file, which the caller closes; None if there is none."""
        _, files = self._ask({"do": "get", "name": name})
        return files[0] if files else None

    def list(self) -> list[str]:
        """The names of all memory files."""
        answer, _ = self._ask({"do": "list"})
        return [str(name) for name in answer["names"]]  # type: ignore[attr-defined]

    def drop(self, names: Sequence[str]) -> None:
        """Removes memory files."""
        for begin in range(0, len(names), 1000):
            self._ask({"do": "drop", "names": list(names[begin : begin + 1000])})

    def end(self) -> None:
        """Ends the holder, and with it the memory of all files."""
        with suppress(OSError):
            self._ask({"do": "end"})
            self._connection.recv(1)  # until it is gone
        self.close()

    def close(self) -> None:
        """Disconnects; the holder stays for a while."""
        self._connection.close()

    def _ask(
        self, message: dict[str, object], files: Sequence[int] = ()
    ) -> tuple[dict[str, object], Sequence[int]]:
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(message).encode()], list(files))
            answer, found, _, _ = socket.recv_fds(self._connection, holder.LARGEST, 1)
        if not answer:
            raise OSError("the snapshot holder has ended")
        return json.loads(answer), found


def end_holder(folder: Path, machine: bytes) -> None:
    """Ends the holder of a run that is over, on this machine, if there is one."""
    run = read_run_id(folder)
    link = HolderLink.connect(name_holder(run, machine)) if run and is_supported() else None
    if link is not None:
        link.end()
