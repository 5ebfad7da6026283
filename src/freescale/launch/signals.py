"""SIGTERM and SIGUSR1 (from Slurm, Kubernetes and spot machines) and Ctrl-C stop a run. All ranks
stop after the same step, save, and end. A second signal ends them at once.

Launchers also send SIGTERM to the survivors of a failure. These save nothing, since they cannot
agree with the lost rank. They end when they notice it, or after a limit without a step.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NoReturn

SILENCE = 10.0  # seconds without a step, after the signal, until this rank ends without saving
# seconds in which a second Ctrl-C is the first one, forwarded by the parent process
SAME_PRESS = 1.0
# the same for other signals: a scheduler sends them to all processes, and launchers forward them
SAME_NOTICE = 5.0
_SLOW_STEPS = 3  # the limit is at least as long as this many steps
_LOOK = 0.25  # seconds between two checks of the clock, after the signal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Exit status after a scheduler's signal: the same command continues the run. It is EX_TEMPFAIL of
# sysexits.h, on which schedulers can requeue.
REQUEUE = 75


def choose_status(stopped: int) -> int:
    """The exit status of a run that completed (0) or that signal `stopped` ended; after Ctrl-C, the
    shell's own."""
    if not stopped:
        return 0
    return 128 + stopped if stopped == signal.SIGINT else REQUEUE


def is_second(number: int, seconds: float) -> bool:
    """Whether a signal `seconds` after the first ends the run at once."""
    return seconds > (SAME_PRESS if number == signal.SIGINT else SAME_NOTICE)


class StopSignals:
    """Listens for signals during a `with` block of the main thread.

    It uses its own thread: the main thread may wait for a lost peer, in code that Python's signal
    handlers do not interrupt.
    """

    def __init__(self, stop: Callable[[], None], rank: int) -> None:
        """`stop` is called once, from the listening thread. Rank 0 prints."""
        self._stop, self._rank = stop, rank
        self.number = 0  # of the first signal
        self.saved = False  # the run, or there was nothing to save
        self._first = self._heard = time.monotonic()
        self._step = 0.0  # seconds of the last one
        self._suspended = False
        self._handlers: dict[int, object] = {}
        self._thread: threading.Thread | None = None

    # ---- called by the training loop

    def note_step(self) -> None:
        """Notes that a step is complete: the peers are alive."""
        now = time.monotonic()
        self._step, self._heard = now - self._heard, now

    @contextmanager
    def suspend_limit(self) -> Iterator[None]:
        """Suspends the limit during work with its own limit: a checkpoint, an evaluation."""
        self._suspended = True
        try:
            yield
        finally:
            self._heard, self._suspended = time.monotonic(), False

    def lift_limit(self) -> None:
        """Lifts the limit once all ranks have left the loop: later work has its own limits."""
        self._suspended = True

    # ---- listening

    def __enter__(self) -> StopSignals:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        # The handlers do nothing. With one installed, Python writes the number to the socket at
        # once, whatever a thread is doing.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="freescale-signals", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Restores the previous handlers."""
        if self._thread is None:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_fd)
        self._sender.close()  # ends the thread
        self._thread.join()
        self._receiver.close()
        self._thread = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if error is not None and self.number and not self.saved:
            self._say(f"nothing was saved after {self._name()}: the run failed")

    def _listen(self) -> None:
        while True:
            self._receiver.settimeout(_LOOK if self.number else None)
            try:
                numbers = self._receiver.recv(64)
            except TimeoutError:
                self._end_after_silence()
                continue
            if not numbers:
                return
            for number in numbers:
                if number in SIGNALS:
                    self._handle(number)

    def _handle(self, number: int) -> None:
        now = time.monotonic()
        if not self.number:
            self._first = self._heard = now
            self.number = number
            self._stop()
            if self._rank == 0:
                self._say(
                    "stopping: the run is saved after this step (the signal once more ends it "
                    "without)"
                )
        elif is_second(number, now - self._first):
            if self.saved:  # launchers send it to the others when the first rank has ended
                self._end("interrupted again", choose_status(self.number))
            self._end("ended without saving", 128 + number)

    def _end_after_silence(self) -> None:
        limit = max(SILENCE, _SLOW_STEPS * self._step)
        if not self._suspended and time.monotonic() - self._heard > limit:
            silent = f"for {limit:.0f} s no step was complete on all ranks"
            self._end(f"ended without saving: {self._name()} came, and {silent}", 1)

    def _end(self, words: str, status: int) -> NoReturn:
        """Ends the process from the thread, without waiting for anything."""
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # a progress bar had hidden the cursor
        self._say(words)
        sys.stdout.flush()
        os._exit(status)

    def _say(self, words: str) -> None:
        who = "" if self._rank == 0 else f"rank {self._rank}: "
        with suppress(OSError):  # the launcher that reads it may be gone
            print(f"freescale: {who}{words}", file=sys.stderr, flush=True)

    def _name(self) -> str:
        return signal.Signals(self.number).name
