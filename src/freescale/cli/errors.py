"""How a command ends: its error message and exit status."""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

P = ParamSpec("P")


def exit_cleanly(command: Callable[P, int | None]) -> Callable[P, NoReturn]:
    """Decorates a command: it ends the process with the status it returns (None: 0).

    Errors that a user can fix (ValueError, OSError) and failures of other ranks print one line and
    have status 1, or the error's `exit_status`; other errors keep their traceback. Ctrl-C is status
    130; 141 means that nobody reads the output.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        rank = os.environ.get("RANK")
        prefix = "freescale: " if rank in (None, "0") else f"freescale: rank {rank}: "
        try:
            status = command(*args, **kwargs)
        except KeyboardInterrupt:
            print(f"{prefix}interrupted", file=sys.stderr)
            status = 130
        except (ValueError, OSError, RuntimeError) as error:
            if isinstance(error, BrokenPipeError) and _has_lost_reader():
                sys.exit(141)
            own = isinstance(error, (ValueError, OSError))
            if not own and not _is_remote(error):
                raise
            # The same message on every rank: the launcher prints it once.
            print(f"{'freescale: error: ' if own else prefix}{error}", file=sys.stderr)
            status = getattr(error, "exit_status", 1)
        sys.stdout.flush()
        sys.stderr.flush()
        if rank is not None:
            # A failed rank must not wait for peers in the destructors of its process groups.
            os._exit(status or 0)
        sys.exit(status or 0)

    return run


def _has_lost_reader() -> bool:
    """Whether nobody reads the output any more, as with `| head`. Drops the rest of the output,
    which the interpreter would try to write again."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    lost = any(event & select.POLLERR for _, event in poll.poll(0))
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return lost


def _is_remote(error: Exception) -> bool:
    """Whether the error concerns another rank or the connection to it."""
    from freescale.transport.api import TransportError
    from freescale.transport.failures import RemoteError

    return isinstance(error, (RemoteError, TransportError))
