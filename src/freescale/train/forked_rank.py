"""A rank that is a child of this process, but was not started by `subprocess`."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import IO


class ForkedRank:
    """The verbs of a Popen that launch.py uses."""

    def __init__(self, pid: int, stderr: IO[str]) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        # held: by another thread, or by the code that the handler of a signal has interrupted
        if self.returncode is None and self._lock.acquire(blocking=False):
            try:
                self.returncode = self._find_status()
            finally:
                self._lock.release()
        return self.returncode

    def _find_status(self) -> int | None:
        try:
            child, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # somebody else has its status: it may have failed
            return 1
        return os.waitstatus_to_exitcode(status) if child else None

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
