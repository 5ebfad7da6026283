"""Exit statuses of a run that mean more than success and failure."""

from __future__ import annotations

import signal

# A scheduler's signal stopped the run, and it can go on where it was: start the same command again.
# It is EX_TEMPFAIL of sysexits.h, which schedulers can be told to requeue on.
REQUEUE = 75


def choose_status(stopped: int) -> int:
    """The exit status of a run that ended as it should, or that signal `stopped` ended: after
    Ctrl-C, which comes from a person, the shell's own."""
    if not stopped:
        return 0
    return 128 + stopped if stopped == signal.SIGINT else REQUEUE
